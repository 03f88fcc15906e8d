"""DataTask: a task whose examples are read from a data set's own files."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image

from mmlens.errors import DataError, OptionError, PictureError, RegionError, VideoError
from mmlens.evidence.regions import Box
from mmlens.tasks.base import SPLITS, Example, Half, Split, Task, check_index, shuffled
from mmlens.tasks.checks import check_example
from mmlens.tasks.rows import Fault, Folder, Row, Rows


@dataclass(frozen=True)
class Check:
    """What reading a whole data set found.

    Attributes
    ----------
    n_usable
        Records that make an example.
    faults
        For every other record, why not, by id; "b (2)" is the second of the id b.
    """

    n_usable: int
    faults: dict[str, str] = field(repr=False)


@dataclass
class _Draw:
    """Usable examples of a half in one order, as far as anyone asked."""

    source: Iterator[Example]
    found: list[Example] = field(default_factory=list)
    done: bool = False


class DataTask(Task):
    """Examples from files, read as they are asked for; faulty records are skipped with a reason and counted.

    The two halves are told by a hash of each record's group (its picture, document or video), so that they share none,
    whatever the seed.

    Parameters
    ----------
    path
        The data set's folder (or file), or "hub:owner/name" for a data set of the hub, streamed.
    subset
        The authors' own split; see `subsets`.
    batch
        Examples that a scan encodes together.

    Attributes
    ----------
    layout
        The files that a folder must hold, in words.
    subsets
        What `subset` may be; the first is the default.
    options
        The reader's own options, which make another task of the same files.
    faults
        Why records were skipped so far, by id.
    """

    layout: ClassVar[str]
    subsets: ClassVar[tuple[str, ...]] = ("test",)
    max_new_tokens = 16
    options: Mapping[str, Any] = {}

    def __init__(self, path: str | Path, *, subset: str | None = None, batch: int = 1) -> None:
        subset = self.subsets[0] if subset is None else subset
        if subset not in self.subsets:
            raise OptionError(
                f"subset={subset!r} of {self.name}",
                expected=f"one of {', '.join(self.subsets)}",
                fix="see docs/data.md",
            )
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
            raise OptionError(f"batch={batch!r}", expected="an int, at least 1", fix="leave it out for 1")
        self.path, self.subset, self.batch = path, subset, batch
        self.hub = path.removeprefix("hub:") if isinstance(path, str) and path.startswith("hub:") else None
        self.faults: dict[str, str] = {}
        self._noted: dict[Any, str] = {}  # the key in `faults` of the record at a position
        self._counted: Counter[str] = Counter()
        self._first: dict[str, Any] = {}  # where an id stands first, and where again
        self._again: dict[str, dict[Any, None]] = {}
        self._good: dict[Any, bool] = {}
        self._draws: dict[tuple[Split, int], _Draw] = {}
        self._halves: dict[Split, list[Any]] | None = None
        self.rows = self.open()
        self._check_layout()

    # ------------------------------------------------------------------ what a reader gives
    @abstractmethod
    def open(self) -> Rows:
        """The records; raises DataError for a folder of another layout."""

    @abstractmethod
    def read(self, row: Row) -> Example:
        """The example of a record; raises Fault for one that cannot be used."""

    @abstractmethod
    def record_id(self, row: Row) -> str:
        """What names a record; may raise KeyError."""

    def group(self, row: Row) -> str:
        """What must not be in both halves: the record's picture, document or video."""
        return self.record_id(row)

    def belongs(self, row: Row) -> bool:
        """Whether a record is of the chosen subset, where files hold several."""
        return True

    # ------------------------------------------------------------------ examples
    def split(self, split: Split) -> Half:
        """One half as something to iterate over; nothing is read yet."""
        super().count(split)
        return Half(self, split)

    def __iter__(self) -> Iterator[Example]:
        """Every usable example of both halves in the order of the files, one at a time."""
        for position, row in self.rows:
            example = self._usable(position, row, None)
            if example is not None:
                yield example

    def iterate(self, split: Split) -> Iterator[Example]:
        """Every usable example of a half in the order of the files."""
        for position, row in self.rows:
            example = self._usable(position, row, split)
            if example is not None:
                yield example

    def check(self) -> Check:
        """Read everything, pictures too."""
        for held in (self.faults, self._noted, self._counted, self._good):
            held.clear()
        n = sum(1 for _ in self)
        return Check(n, dict(self.faults))

    def count(self, split: Split, n: int | None = None, seed: int = 0) -> int:
        """How many examples these arguments mean; fewer than asked for raises DataError, with the faults counted."""
        wanted = super().count(split, n, seed)
        self._fill(split, seed, wanted)
        have = len(self._draws[split, seed].found)
        if not have or (n is not None and have < n):
            raise DataError(
                f"{have} usable examples in the half {split!r} of {self.name} ({self.subset}), for n={n}"
                + (f"; skipped so far: {self._told()}" if self.faults else ""),
                expected=f"at least {n or 1}",
                fix=f"ask for fewer, or see `mmlens tasks check {self.name} {self.path}`",
            )
        return min(wanted, have)

    def example(self, split: Split, index: int, seed: int) -> Example:
        """Example number `index` of a half, in the order of a seed."""
        check_index(split, index, seed)
        self._fill(split, seed, index + 1)
        found = self._draws[split, seed].found
        if index >= len(found):
            raise DataError(
                f"example {index} of {len(found)} usable ones in the half {split!r} of {self.name}",
                expected=f"an index below {len(found)}",
                fix="ask for fewer",
            )
        return found[index]

    def identity(self) -> dict[str, Any]:
        """Name, subset and where the data came from (a folder's name, not its place)."""
        where = self.path if self.hub else Path(self.path).name
        return {"name": self.name, "subset": self.subset, "data": str(where), **self.options}

    # ------------------------------------------------------------------ inside
    def _folder(self) -> Folder:
        """The data set's folder; DataError for a hub id, where the reader cannot stream one."""
        if self.hub:
            raise DataError(
                f"{self.name} from hub:{self.hub}", expected=self.layout, fix="download it and give its folder"
            )
        return Folder(self.path, layout=self.layout)

    def _check_layout(self) -> None:
        """Files none of whose first records has the right form are another data set's."""
        if self.rows.streamed:
            return
        first = list(islice(self.rows.outline(), 20))
        why = f"{self.rows.source or 'it'} holds no records"
        for _, row in first:
            try:
                if isinstance(row, Fault):
                    raise row
                self.record_id(row), self.group(row), self.belongs(row)
                return
            except (Fault, *FAULTS) as error:
                why = _reason(error)
        raise DataError(
            f"{self.path} does not hold {self.name}: {why}",
            expected=self.layout,
            fix="check the folder, and that the files are whole",
        )

    def _told(self) -> str:
        first = ", ".join(f"{k}: {v}" for k, v in list(self.faults.items())[:3])
        return f"{len(self.faults)} ({first}{', ...' if len(self.faults) > 3 else ''})"

    def _half(self, row: Row) -> Split:
        digest = hashlib.sha256(f"{self.name}/{self.group(row)}".encode()).digest()
        return SPLITS[digest[0] % 2]

    def _fill(self, split: Split, seed: int, n: int) -> None:
        draw = self._draws.setdefault((split, seed), _Draw(self._ordered(split, seed)))
        while len(draw.found) < n and not draw.done:
            example = next(draw.source, None)
            if example is None:
                draw.done = True
            else:
                draw.found.append(example)

    def _ordered(self, split: Split, seed: int) -> Iterator[Example]:
        """Usable examples of a half in the order of a seed; a streamed data set is shuffled through a buffer."""
        if self.rows.streamed:
            for position, row in self.rows.shuffled(seed):
                example = self._usable(position, row, split)
                if example is not None:
                    yield example
            return
        if self._halves is None:
            self._halves = {half: [] for half in SPLITS}
            for position, row in self.rows.outline():
                try:
                    if isinstance(row, Fault):
                        raise row
                    if not self.belongs(row):
                        continue
                    half, name = self._half(row), self.record_id(row)
                    self._halves[half].append(position)
                    self._stands(name, position)
                except (Fault, *FAULTS) as error:
                    self._note(f"record at {position}", position, error)
        mine = self._halves[split]
        for i in shuffled(len(mine), seed):
            try:
                row = self.rows.get(mine[i])
            except Fault as fault:
                row = fault
            example = self._usable(mine[i], row, None)
            if example is not None:
                yield example

    def _usable(self, position: Any, row: Row | Fault, split: Split | None) -> Example | None:
        name = f"record at {position}"
        try:
            if isinstance(row, Fault):
                raise row
            name = self.record_id(row)
            if not self.belongs(row):
                return None
            again = self._stands(name, position)
            if split is not None and self._half(row) != split:
                return None
            example = self._checked(row)
            if again and self._good_before(name, position):
                raise Fault(f"the id {name!r} stands twice")
            return example
        except (Fault, *FAULTS) as error:
            self._note(name, position, error)
            return None

    def _checked(self, row: Row) -> Example:
        example = self.read(row)
        check_example(example)
        object.__setattr__(example, "_group", self.group(row))
        return example

    def _note(self, name: str, position: Any, error: Exception) -> None:
        name = _printable(name)
        where = name if self.rows.streamed else position  # places in a stream change with its order
        if where not in self._noted:
            key = name
            while key in self.faults:
                self._counted[name] += 1
                key = f"{name} ({self._counted[name] + 1})"
            self._noted[where] = key
        self.faults[self._noted[where]] = _reason(error)

    def _stands(self, name: str, position: Any) -> bool:
        """Whether a record's id stands in an earlier one too, as far as the files were read in order."""
        if self.rows.streamed or self._first.setdefault(name, position) == position:
            return False
        self._again.setdefault(name, {})[position] = None
        return True

    def _good_before(self, name: str, position: Any) -> bool:
        """Whether a record of the same id before this one is usable."""
        earlier = takewhile(lambda p: p != position, self._again[name])
        return any(self._is_good(p) for p in (self._first[name], *earlier))

    def _is_good(self, position: Any) -> bool:
        if position not in self._good:
            try:
                self._checked(self.rows.get(position))
                self._good[position] = True
            except (Fault, *FAULTS):
                self._good[position] = False
        return self._good[position]


# What a record of another form than expected, or a broken file, raises.
FAULTS = (
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    MemoryError,
    RuntimeError,
    OSError,
    PictureError,
    RegionError,
    VideoError,
)
LONGEST = 240  # characters of a reason


def _reason(error: Exception) -> str:
    """One short sentence."""
    said = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, KeyError):
        said = f"the record lacks {error}"
    elif not isinstance(error, Fault | PictureError | RegionError | VideoError):
        said = f"the record has another form than expected: {said}"
    said = _printable(said)
    return said if len(said) <= LONGEST else said[: LONGEST - 3] + "..."


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair cannot be written anywhere


def box_inside(box: Box, width: float, height: float, *, slack: float = 1.0) -> Box:
    """A box of a record, in its own units; a Fault if it leaves a picture of this size by more than `slack` units."""
    if box.x0 < -slack or box.y0 < -slack or box.x1 > width + slack or box.y1 > height + slack:
        raise Fault(f"the box {box.corners} leaves its picture of {width:g} x {height:g}")
    return box


def encoded(value: Any, folder: Any = None) -> Any:
    """A picture cell of a parquet or hub row: the encoded bytes, or the file that it names inside `folder`."""
    if isinstance(value, dict):
        if value.get("bytes"):
            return value["bytes"]
        value = value.get("path")
    if isinstance(value, bytes | bytearray) and value:
        return bytes(value)
    if isinstance(value, Image.Image):
        return value
    if isinstance(value, str) and folder is not None:
        return folder.inside(value)
    raise Fault("the record has no picture")
