"""What readers share: options, subjects, choices told by letters, and which pages of a document are shown."""

from __future__ import annotations

from pathlib import Path
from string import ascii_uppercase
from typing import Any

from mmlens.errors import OptionError
from mmlens.tasks.base import Example
from mmlens.tasks.data import DataTask
from mmlens.tasks.rows import Fault
from mmlens.tasks.scoring import choice_letter


def one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """An option's value, if it is one of those that exist."""
    if value not in allowed:
        raise OptionError(
            f"{name}={value!r}",
            expected=f"one of {', '.join(map(repr, allowed))}",
            fix=f"leave {name}= out for the first",
        )
    return value


def subject_in(question: str, words: str, before: str = "", after: str = "") -> str | None:
    """Words that a question asks about, as a piece of it that stands there once: alone, or with what is around them."""
    for piece in (words, f"{words}{after}", f"{before}{words}{after}"):
        if words and question.count(piece) == 1:
            return piece
    return None


class Lettered(DataTask):
    """Questions whose answer is the letter of a choice; `meta["options"]` has the choices' texts, from A on."""

    ask = "Answer with the letter of the right choice."

    def score(self, said: str, example: Example) -> float:
        return float(choice_letter(said, example.meta["options"]) == example.answer)

    def well_formed(self, said: str, example: Example) -> bool:
        return choice_letter(said, example.meta["options"]) is not None


def letters_for(options: Any) -> tuple[str, ...]:
    """A, B, ... for some choices; a Fault for none or more than 26."""
    if not 1 <= len(options) <= 26:
        raise Fault(f"{len(options)} choices")
    return tuple(ascii_uppercase[: len(options)])


def shown_pages(n: int, evidence: set[int], most: int | None) -> list[int]:
    """Which of `n` pages are shown if at most `most` are: those of the evidence, then from the first on; in order."""
    outside = sorted(p for p in evidence if not 0 <= p < n)
    if outside:
        raise Fault(f"the evidence is on page {outside[0]} (from 0) of {n}")
    if most is None or n <= most:
        return list(range(n))
    if len(evidence) > most:
        raise Fault(f"the evidence is on {len(evidence)} pages, more than max_pages={most}")
    others = [p for p in range(n) if p not in evidence]
    return sorted([*evidence, *others[: most - len(evidence)]])


class PagedTask(DataTask):
    """Questions about documents given as page pictures, of which at most `max_pages` are shown; by default all."""

    def __init__(
        self, path: str | Path, *, max_pages: int | None = None, subset: str | None = None, batch: int = 1
    ) -> None:
        if max_pages is not None and (not isinstance(max_pages, int) or isinstance(max_pages, bool) or max_pages < 1):
            raise OptionError(
                f"max_pages={max_pages!r}", expected="an int, at least 1, or None", fix="leave it out for all"
            )
        self.max_pages = max_pages
        self.options = {"max_pages": max_pages}
        super().__init__(path, subset=subset, batch=batch)
