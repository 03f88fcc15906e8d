"""Rows of data files, one at a time: JSON, JSON lines, parquet, and data sets of the hub; and folders nothing leaves."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmlens.errors import DataError

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

    def inside(self, name: Any) -> Path:
        """The file that a record names; a Fault if it is missing or lies outside the root."""
        if not isinstance(name, str) or not name:
            raise Fault(f"a file named {name!r}")
        path = self.root / name
        if not path.resolve().is_relative_to(self._real):
            raise Fault(f"the path {name!r} leaves the data set's folder")
        if not path.is_file():
            raise Fault(f"{name} is missing")
        return path

    def find(self, name: Any, *under: str) -> Path:
        """The file that a record names, in the root or in the first of the folders `under` (globs) that has it."""
        if not isinstance(name, str) or not name:
            raise Fault(f"a file named {name!r}")
        for place in (self.root, *(p for pattern in under for p in sorted(self.root.glob(pattern)) if p.is_dir())):
            if (place / name).is_file():
                return self.inside(str((place / name).relative_to(self.root)))
        return self.inside(name)

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


class Rows(ABC):
    """Records in file order. A broken one comes as a Fault in its place."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[Any, Row | Fault]]:
        """(position, row); the position is what `get` takes."""

    @abstractmethod
    def get(self, position: Any) -> Row:
        """The row at a position."""


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
        self.path = path

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


class JsonList(Rows):
    """A JSON file that is one list of objects, or an object whose values are."""

    def __init__(self, path: Path, *, layout: str) -> None:
        self.path = path
        try:
            found = json.loads(path.read_bytes())
        except (ValueError, RecursionError, OSError) as error:
            raise DataError(f"{path} is no JSON: {error}", expected=layout, fix="download the file again") from None
        if not isinstance(found, list):
            raise DataError(f"{path} holds {type(found).__name__}", expected=layout, fix="check which file this is")
        self.rows = found

    def __iter__(self) -> Iterator[tuple[int, Row | Fault]]:
        for i, row in enumerate(self.rows):
            yield i, row if isinstance(row, dict) else Fault(f"a record that is {type(row).__name__}, not an object")

    def get(self, position: int) -> Row:
        return self.rows[position]


class Parquet(Rows):
    """Parquet files one after another; a row group at a time is held."""

    def __init__(self, paths: Sequence[Path], *, columns: Sequence[str] | None = None, layout: str = "") -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.paths = tuple(paths)
        try:
            files = [pq.ParquetFile(p) for p in self.paths]
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(
                f"{', '.join(map(str, paths))}: {error}", expected=layout or "parquet files", fix="download it again"
            ) from None
        self.names = tuple(files[0].schema_arrow.names) if files else ()
        self.columns = None if columns is None else tuple(c for c in columns if c in self.names)
        self._groups = [f.num_row_groups for f in files]
        for f in files:
            f.close()

    def __iter__(self) -> Iterator[tuple[tuple[int, int, int], Row | Fault]]:
        for file, groups in enumerate(self._groups):
            for group in range(groups):
                for row, values in enumerate(_row_group(self.paths[file], group, self.columns)):
                    yield (file, group, row), values

    def get(self, position: tuple[int, int, int]) -> Row:
        """All columns of one row."""
        file, group, row = position
        return _row_group(self.paths[file], group, None)[row]


@lru_cache(maxsize=2)
def _row_group(path: Path, group: int, columns: tuple[str, ...] | None) -> list[Row]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        return file.read_row_group(group, columns=None if columns is None else list(columns)).to_pylist()


class Hub(Rows):
    """A data set of the hub, streamed. Rows stay as the stream gives them, encoded pictures undecoded."""

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

    def shuffled(self, seed: int) -> Iterator[tuple[int, Row | Fault]]:
        """The stream through a buffer of 1,000 rows and shuffled shards."""
        yield from enumerate(self.stream.shuffle(seed=seed, buffer_size=1000))

    def __iter__(self) -> Iterator[tuple[int, Row | Fault]]:
        yield from enumerate(self.stream)

    def get(self, position: int) -> Row:
        return next(iter(self.stream.skip(position)))
