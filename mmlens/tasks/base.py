"""Task: questions with answers and evidence, in two halves: one that ranks, one that judges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mmlens.errors import OptionError
from mmlens.evidence.regions import Region

if TYPE_CHECKING:
    from mmlens.model.hooked import HookedVLM
    from mmlens.scan import Evaluation

Split = Literal["rank", "judge"]
SPLITS: tuple[Split, ...] = ("rank", "judge")


@dataclass(frozen=True)
class Example:
    """One question about pictures, pages or a video.

    Attributes
    ----------
    id
        Names the example within its task.
    answers
        Every accepted answer; the first is the one that is teacher-forced.
    images, video, pages
        What is asked about, one of the three: pictures, a video (path, frames or VideoFile), pages of a document.
    subject
        The words of the question that name the asked thing, or None.
    evidence, distractors
        Where the answer can be seen, and where other things are. A plain shape lies on the first picture; Page and
        PageRegion count the example's own pictures or pages from 0; Tube counts the video file's own frames.
    choices
        The answers to choose from, where the question offers some.
    meta
        Whatever else the record says.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    images: tuple[Any, ...] = field(default=(), repr=False)
    video: Any = field(default=None, repr=False)
    pages: tuple[Any, ...] = field(default=(), repr=False)
    subject: str | None = None
    evidence: tuple[Region, ...] = ()
    distractors: tuple[Region, ...] = field(default=(), repr=False)
    choices: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # The reader's group, so that halves stay apart when examples are written and read again.
    _group: str | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def answer(self) -> str | None:
        """The first accepted answer."""
        return self.answers[0] if self.answers else None

    @property
    def pictures(self) -> tuple[Any, ...]:
        """Pictures or pages, in prompt order."""
        return self.images or self.pages


class Task(ABC):
    """A source of examples.

    Attributes
    ----------
    name
        As given to `load_task`.
    candidates
        Every answer that is well formed; anything else counts as a format failure.
    chance
        Accuracy of guessing.
    default_n
        Examples taken when `n` is not given.
    batch
        Examples that a scan encodes together.
    max_new_tokens
        Tokens to generate for an answer; by default the longest candidate's, and one.
    video_options
        How videos are read: `fps` and `max_frames`, as `vlm.prompt` takes them.
    """

    name: str
    candidates: tuple[str, ...] = ()
    chance: float = float("nan")
    default_n: int = 100
    batch: int = 50
    max_new_tokens: int | None = None
    video_options: Mapping[str, Any] = {}

    def count(self, split: Split, n: int | None = None, seed: int = 0) -> int:
        """How many examples these arguments mean; raises OptionError for ones that mean nothing."""
        n = self.default_n if n is None else n
        _check_half(split)
        _check_ints(("n", n, 1), ("seed", seed, 0))
        return n

    def examples(self, split: Split, n: int | None = None, seed: int = 0) -> list[Example]:
        """The first `n` examples of a half; the same arguments give the same examples."""
        return [self.example(split, i, seed) for i in range(self.count(split, n, seed))]

    def sample(self, n: int, seed: int = 0) -> list[Example]:
        """`n` examples for a look, half of them from each half."""
        first = self.count("rank", -(-n // 2) if isinstance(n, int) else n, seed)
        return self.examples("rank", first, seed) + (self.examples("judge", n - first, seed) if n > first else [])

    def split(self, split: Split) -> Half:
        """One half as something to iterate over."""
        self.count(split)
        return Half(self, split)

    def __iter__(self) -> Iterator[Example]:
        """Every example, one at a time; of generated tasks, `default_n` of each half."""
        for split in SPLITS:
            yield from self.split(split)

    def iterate(self, split: Split) -> Iterator[Example]:
        """Examples of a half, one at a time."""
        for i in range(self.count(split)):
            yield self.example(split, i, 0)

    @abstractmethod
    def example(self, split: Split, index: int, seed: int) -> Example:
        """One example; a pure function of its arguments."""

    def score(self, said: str, example: Example) -> float:
        """How right an answer is, 0 to 1; here whether it is one of the accepted ones."""
        return float(said in example.answers)

    def well_formed(self, said: str, example: Example) -> bool:
        """Whether an answer has the form that the question asks for."""
        allowed = example.choices or self.candidates
        return not allowed or said in allowed

    def summary(self, examples: Sequence[Example], said: Sequence[str]) -> dict[str, float]:
        """Numbers over a whole evaluation, beside its accuracy."""
        return {}

    def identity(self) -> dict[str, Any]:
        """What tells this task from others in a result's provenance."""
        return {"name": self.name}

    def evaluate(self, vlm: HookedVLM, *, n: int | None = None, seed: int = 0, split: Split = "judge") -> Evaluation:
        """Accuracy of the model's own answers; see `mmlens.scan.evaluate`."""
        from mmlens.scan import evaluate

        return evaluate(vlm, self, n=n, seed=seed, split=split)


@dataclass(frozen=True)
class Half:
    """One half of a task."""

    task: Task
    name: Split

    def __iter__(self) -> Iterator[Example]:
        return self.task.iterate(self.name)

    def sample(self, n: int, seed: int = 0) -> list[Example]:
        """The first `n` examples of this half in the order of a seed."""
        return self.task.examples(self.name, n, seed)


def check_index(split: Any, index: Any, seed: Any) -> None:
    """OptionError unless these name an example."""
    _check_half(split)
    _check_ints(("index", index, 0), ("seed", seed, 0))


def _check_half(split: Any) -> None:
    if split not in SPLITS:
        raise OptionError(
            f"split={split!r}", expected="'rank' or 'judge'", fix="scans rank, task.evaluate judges; no other half"
        )


def _check_ints(*given: tuple[str, Any, int]) -> None:
    for name, value, least in given:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise OptionError(
                f"{name}={value!r}", expected=f"an int, at least {least}", fix=f"leave {name}= out, or give one"
            )


def shuffled(n: int, seed: int) -> list[int]:
    """0 to n - 1 in the order of a seed."""
    return np.random.default_rng(seed).permutation(n).tolist()
