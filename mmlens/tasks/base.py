"""Task: questions with answers and evidence, in two halves: one that ranks, one that judges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mmlens.errors import OptionError
from mmlens.evidence.regions import Box

if TYPE_CHECKING:
    from mmlens.model.hooked import HookedVLM
    from mmlens.scan import Evaluation

Split = Literal["rank", "judge"]
SPLITS: tuple[Split, ...] = ("rank", "judge")


@dataclass(frozen=True)
class TaskExample:
    """One question about pictures.

    Attributes
    ----------
    key
        Names the example within its task.
    subject
        The words of the question that name the asked thing, or None.
    evidence, distractors
        Boxes on the first picture: where the answer can be seen, and where other things are.
    """

    key: str
    question: str
    images: tuple[Any, ...] = field(repr=False)
    answer: str
    subject: str | None = None
    evidence: tuple[Box, ...] = ()
    distractors: tuple[Box, ...] = ()


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
    """

    name: str
    candidates: tuple[str, ...] = ()
    chance: float = float("nan")
    default_n: int = 100

    def count(self, split: Split, n: int | None = None, seed: int = 0) -> int:
        """How many examples these arguments mean, drawing none; raises OptionError for ones that mean nothing."""
        if split not in SPLITS:
            raise OptionError(
                f"split={split!r}", expected="'rank' or 'judge'", fix="scans rank, task.evaluate judges; no other half"
            )
        n = self.default_n if n is None else n
        for name, value, least in (("n", n, 1), ("seed", seed, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise OptionError(
                    f"{name}={value!r}", expected=f"an int, at least {least}", fix=f"leave {name}= out, or give one"
                )
        return n

    def examples(self, split: Split, n: int | None = None, seed: int = 0) -> list[TaskExample]:
        """The first `n` examples of a half; the same arguments give the same examples."""
        return [self.example(split, i, seed) for i in range(self.count(split, n, seed))]

    @abstractmethod
    def example(self, split: Split, index: int, seed: int) -> TaskExample:
        """One example; a pure function of its arguments."""

    def identity(self) -> dict[str, Any]:
        """What tells this task from others in a result's provenance."""
        return {"name": self.name}

    def evaluate(self, vlm: HookedVLM, *, n: int | None = None, seed: int = 0, split: Split = "judge") -> Evaluation:
        """Accuracy of the model's own answers; see `mmlens.scan.evaluate`."""
        from mmlens.scan import evaluate

        return evaluate(vlm, self, n=n, seed=seed, split=split)
