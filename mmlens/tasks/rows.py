"""Rows of data files, one at a time: JSON, JSON lines, parquet, data sets of the hub; and folders nothing leaves."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmlens.errors import DataError
from mmlens.tasks.base import shuffled

Row = dict[str, Any]


class Fault(Exception):
    """A record that cannot be used, and why; counted by the task, never seen by a user as an exception."""


class Folder:
    """A data set's root. Paths that records name must lie inside it."""

    def __init__(self, root: str | Path, *, layout: str) -> None:
        self.root, self.layout = Path(root), layout
        if not self.root.is_dir():
            raise DataError(f"{self.root} is no folder", expected=layout, fix="give the folder that holds these files")
        self._real = self.root.resolve()
        self._found: dict[str, list[Path]] = {}

    def inside(self, name: Any) -> Path:
        """The file that a record names; a Fault if it is missing or lies outside the root."""
        if not isinstance(name, str) or not name or "\0" in name:
            raise Fault(f"a file named {name!r}")
        path = self.root / name
        try:
            leaves = Path(name).is_absolute() or not path.resolve().is_relative_to(self._real)
            exists = path.is_file()
        except (OSError, RuntimeError, ValueError) as error:  # too long a name, links in a circle
            raise Fault(f"no file can be named {name[:60]!r}: {_why(error)}") from None
        if leaves:
            raise Fault(f"the path {name!r} leaves the data set's folder")
        if not exists:
            raise Fault(f"{name} is missing")
        return path

    def find(self, name: Any, *under: str) -> Path:
        """The file that a record names, in the root or in the first of the folders `under` (globs) that has it."""
        if isinstance(name, str) and name and "\0" not in name and not Path(name).is_absolute():
            for place in (self.root, *(p for pattern in under for p in self._folders(pattern))):
                try:
                    exists = (place / name).is_file()
                except (OSError, ValueError):
                    break  # `inside` says why
                if exists:
                    return self.inside(str((place / name).relative_to(self.root)))
        return self.inside(name)

    def _folders(self, pattern: str) -> list[Path]:
        if pattern not in self._found:  # a glob over a folder of 80,000 pictures is not for every record
            self._found[pattern] = sorted(p for p in self.root.glob(pattern) if p.is_dir())
        return self._found[pattern]

    def first(self, *names: str) -> Path:
        """The first of several names (globs too) that exists; DataError names the whole layout otherwise."""
        for name in names:
            found = sorted(p for p in self.root.glob(name) if p.is_file())
            if found:
                return found[0]
        raise DataError(
            f"{self.root} holds none of {', '.join(names)}", expected=self.layout, fix="check the folder, or the subset"
        )

    def all(self, *names: str) -> list[Path]:
        """Every file that matches any of the globs, in order."""
        return sorted({p for name in names for p in self.root.glob(name) if p.is_file()})


def _why(error: Exception) -> str:
    """An error's words, without the file name that OSError repeats."""
    return (isinstance(error, OSError) and error.strerror) or str(error)[:120]


class Rows(ABC):
    """Records in file order. A broken one comes as a Fault in its place.

    Attributes
    ----------
    source
        The file that they come from, where it is one.
    streamed
        Whether rows come over the network, so that `get` is slow and `shuffled` is what gives an order.
    """

    source: str = ""
    streamed = False

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[Any, Row | Fault]]:
        """(position, row); the position is what `get` takes."""

    @abstractmethod
    def get(self, position: Any) -> Row:
        """The row at a position."""

    def outline(self) -> Iterator[tuple[Any, Row | Fault]]:
        """As `__iter__`, with no more of each row than what tells records and their groups apart."""
        return iter(self)

    def shuffled(self, seed: int) -> Iterator[tuple[Any, Row | Fault]]:
        """Rows in an order of the seed."""
        positions = [position for position, _ in self.outline()]
        for i in shuffled(len(positions), seed):
            try:
                yield positions[i], self.get(positions[i])
            except Fault as fault:
                yield positions[i], fault


class Records(Rows):
    """Records that are already held."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[tuple[int, Row | Fault]]:
        for i, row in enumerate(self.rows):
            yield i, row if isinstance(row, dict) else Fault(f"a record that is {type(row).__name__}, not an object")

    def get(self, position: int) -> Row:
        return self.rows[position]


def _object(text: str | bytes) -> Row:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Fault(f"no JSON: {error}") from None
    if not isinstance(row, dict):
        raise Fault(f"a record that is {type(row).__name__}, not an object")
    return row


class JsonLines(Rows):
    """One JSON object a line; only the line that is asked for is held."""

    def __init__(self, path: Path) -> None:
        self.path, self.source = path, str(path)

    def __iter__(self) -> Iterator[tuple[int, Row | Fault]]:
        with self.path.open("rb") as file:
            at = 0
            for line in file:
                if line.strip():
                    try:
                        yield at, _object(line)
                    except Fault as fault:
                        yield at, fault
                at += len(line)

    def get(self, position: int) -> Row:
        with self.path.open("rb") as file:
            file.seek(position)
            return _object(file.readline())


class Tsv(Rows):
    """Lines of cells between tabs, named by the first; a cell may be quoted, and as large as a picture."""

    def __init__(self, path: Path) -> None:
        self.path, self.source = path, str(path)
        with path.open("rb") as file:
            self.names = next(_cells(file), [])
            self._first = file.tell()

    def _row(self, cells: list[str]) -> Row | Fault:
        if len(cells) != len(self.names):
            return Fault(f"a line of {len(cells)} cells, not {len(self.names)}")
        return dict(zip(self.names, cells))

    def __iter__(self) -> Iterator[tuple[int, Row | Fault]]:
        with self.path.open("rb") as file:
            at = file.seek(self._first)
            for cells in _cells(file):
                if cells:
                    yield at, self._row(cells)
                at = file.tell()

    def get(self, position: int) -> Row:
        with self.path.open("rb") as file:
            file.seek(position)
            row = self._row(next(_cells(file), []))
        if isinstance(row, Fault):
            raise row
        return row


def _cells(file: Any) -> Iterator[list[str]]:
    """Cells of each record; the file stands after the record that was given last."""
    for first in iter(file.readline, b""):
        text = first
        while text.count(b'"') % 2 and (more := file.readline()):
            text += more
        line, cells, at = text.decode("utf-8", "replace").rstrip("\r\n"), [], 0
        while at <= len(line):
            end = line.find("\t", at)
            if line.startswith('"', at):  # a quote inside is doubled, so cells end at an odd one
                stop = at + 1
                while (stop := line.find('"', stop)) >= 0 and line.startswith('"', stop + 1):
                    stop += 2
                end = line.find("\t", stop) if stop >= 0 else -1
                cells.append(line[at + 1 : stop if stop >= 0 else len(line)].replace('""', '"'))
            else:
                cells.append(line[at : end if end >= 0 else len(line)])
            at = end + 1 if end >= 0 else len(line) + 1
        yield cells if line else []


def load_json(path: Path, *, layout: str) -> Any:
    """What a JSON file holds; DataError for one that is none."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise DataError(f"{path} is no JSON: {error}", expected=layout, fix="download the file again") from None


class JsonList(Records):
    """A JSON file that is one list of objects."""

    def __init__(self, path: Path, *, layout: str) -> None:
        found = load_json(path, layout=layout)
        if not isinstance(found, list):
            raise DataError(f"{path} holds {type(found).__name__}", expected=layout, fix="check which file this is")
        super().__init__(found)
        self.source = str(path)


class Parquet(Rows):
    """Parquet files one after another; a row group at a time is held.

    Parameters
    ----------
    columns
        What `outline` reads; all by default.
    """

    def __init__(self, paths: Sequence[Path], *, columns: Sequence[str] | None = None, layout: str = "") -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.paths = tuple(paths)
        self.source = ", ".join(map(str, self.paths[:3]))
        self.names: tuple[str, ...] = ()
        self._groups: list[int] = []
        self._starts: list[tuple[int, int, int]] = []  # (row over all files, file, row group)
        total = 0
        for path in self.paths:
            try:
                with pq.ParquetFile(path) as file:
                    self.names = self.names or tuple(file.schema_arrow.names)
                    for group in range(file.num_row_groups):
                        self._starts.append((total, len(self._groups), group))
                        total += file.metadata.row_group(group).num_rows
                    self._groups.append(file.num_row_groups)
            except (pa.ArrowInvalid, OSError) as error:
                raise DataError(
                    f"{path} is no parquet: {error}", expected=layout or "parquet files", fix="download it again"
                ) from None
        self.columns = None if columns is None else [c for c in columns if c in self.names]
        self._held: tuple[tuple[int, int], Any] | None = None
        self._total = total

    def nth(self, number: int) -> Row:
        """The row with this number over all files, from 0."""
        if not 0 <= number < self._total:
            raise Fault(f"row {number} of {self._total}")
        start, file, group = self._starts[bisect_right(self._starts, number, key=lambda s: s[0]) - 1]
        return self.get((file, group, number - start))

    def _table(self, file: int, group: int, columns: list[str] | None) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self.paths[file]) as opened:
                return opened.read_row_group(group, columns=columns)
        except (pa.ArrowException, OSError) as error:
            raise Fault(f"row group {group} of {self.paths[file].name} cannot be read: {error}") from None

    def _walk(self, columns: list[str] | None) -> Iterator[tuple[tuple[int, int, int], Row | Fault]]:
        for file, groups in enumerate(self._groups):
            for group in range(groups):
                try:
                    table = self._table(file, group, columns)
                except Fault as fault:
                    yield (file, group, 0), fault
                    continue
                for row in range(table.num_rows):
                    yield (file, group, row), table.slice(row, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[tuple[tuple[int, int, int], Row | Fault]]:
        return self._walk(None)

    def outline(self) -> Iterator[tuple[tuple[int, int, int], Row | Fault]]:
        return self._walk(self.columns)

    def get(self, position: tuple[int, int, int]) -> Row:
        file, group, row = position
        if self._held is None or self._held[0] != (file, group):
            self._held = (file, group), self._table(file, group, None)
        return self._held[1].slice(row, 1).to_pylist()[0]


class Each(Rows):
    """Every record once for each item of its list `key`; the item's number is added as "item"."""

    def __init__(self, rows: Rows, key: str) -> None:
        self.rows, self.key, self.streamed, self.source = rows, key, rows.streamed, rows.source

    def _split(self, found: Iterator[tuple[Any, Row | Fault]]) -> Iterator[tuple[tuple[Any, int], Row | Fault]]:
        for position, row in found:
            items = row if isinstance(row, Fault) else row.get(self.key)
            if isinstance(items, list):
                yield from (((position, k), {**row, "item": k}) for k in range(len(items)))  # type: ignore[dict-item]
            else:
                yield (
                    (position, 0),
                    items if isinstance(items, Fault) else Fault(f"the record lacks a list {self.key!r}"),
                )

    def __iter__(self) -> Iterator[tuple[tuple[Any, int], Row | Fault]]:
        return self._split(iter(self.rows))

    def outline(self) -> Iterator[tuple[tuple[Any, int], Row | Fault]]:
        return self._split(self.rows.outline())

    def shuffled(self, seed: int) -> Iterator[tuple[tuple[Any, int], Row | Fault]]:
        return self._split(self.rows.shuffled(seed))

    def get(self, position: tuple[Any, int]) -> Row:
        return {**self.rows.get(position[0]), "item": position[1]}


class Hub(Rows):
    """A data set of the hub, streamed. Rows stay as the stream gives them, encoded pictures undecoded."""

    streamed = True

    def __init__(self, name: str, *, config: str | None = None, split: str = "test") -> None:
        try:
            import datasets
        except ImportError:
            raise DataError(
                f"hub:{name} without the package `datasets`",
                expected="pip install 'mmlens[data]'",
                fix="install it, or download the data set and give its folder",
            ) from None
        try:
            stream = datasets.load_dataset(name, config, split=split, streaming=True)
            for column, feature in (stream.features or {}).items():
                if isinstance(feature, datasets.Image):
                    stream = stream.cast_column(column, datasets.Image(decode=False))
        except Exception as error:
            raise DataError(
                f"hub:{name} (config {config}, split {split}) cannot be opened: {type(error).__name__}: {error}",
                expected="a reachable data set with this config and split",
                fix="check the id and the network, or download it and give its folder",
            ) from error
        self.stream = stream

    @property
    def names(self) -> tuple[str, ...]:
        """Columns, as far as the data set says."""
        return tuple(self.stream.column_names or ())

    def shuffled(self, seed: int) -> Iterator[tuple[int, Row | Fault]]:
        """The stream through a buffer of 1,000 rows and shuffled shards."""
        yield from enumerate(self.stream.shuffle(seed=seed, buffer_size=1000))

    def __iter__(self) -> Iterator[tuple[int, Row | Fault]]:
        yield from enumerate(self.stream)

    def get(self, position: int) -> Row:
        return next(iter(self.stream.skip(position)))
