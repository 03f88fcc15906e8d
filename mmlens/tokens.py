"""Sets of token positions, and the one grammar of token groups ("image-evidence", "question+suffix", ...)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Union

from mmlens.errors import TokenGroupError

GROUP_NAMES = (
    "all",
    "text",
    "system",
    "question",
    "subject",
    "suffix",
    "last",
    "output",
    "image",
    "image:0",
    "evidence",
    "distractor",
)


@dataclass(frozen=True)
class TokenSet:
    """Columns of the encoded batch, one sorted tuple for each example.

    Attributes
    ----------
    per_example
        Sorted positions (columns of `input_ids`) for every example.
    shares
        For regions only: for every example, the fraction (0..1) of each token's pixels that lies in the region.
    reason
        Why the set is empty, where it is.
    by_view
        For regions only: the same set for each look at the picture ("tiles", "thumbnail", "frame:3", ...).

    Examples
    --------
    >>> from mmlens import TokenSet
    >>> (TokenSet.of([4, 2, 3]) - TokenSet.of([3])).positions
    (2, 4)
    """

    per_example: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[float, ...], ...] | None = field(default=None, compare=False)
    reason: str | None = field(default=None, compare=False)
    by_view: Mapping[str, TokenSet] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, *examples: Iterable[int]) -> TokenSet:
        """A set from one iterable of positions for each example."""
        return cls(tuple(tuple(sorted(set(map(int, e)))) for e in examples))

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions of the only example; raises for a batch."""
        return self._only(self.per_example, "positions", "per_example")

    @property
    def coverage(self) -> tuple[float, ...]:
        """Beside `.positions`: the fraction of each token's pixels that lies in the region; () for other sets."""
        return self._only(self.shares or ((),) * len(self.per_example), "coverage", "shares")

    def _only(self, of: tuple[tuple, ...], name: str, other: str) -> tuple:
        if len(of) != 1:
            raise TokenGroupError(
                f"`.{name}` of a set over {len(of)} examples",
                expected="a set over one example",
                fix=f"use `.{other}`, or index the prompt first: `prompt[i].tokens(...)`",
            )
        return of[0]

    def __len__(self) -> int:
        """Positions over all examples."""
        return sum(map(len, self.per_example))

    def _join(self, other: TokenSet, merge: Callable[[set[int], set[int]], set[int]]) -> TokenSet:
        mine, theirs = self.per_example, other.per_example
        if len(mine) != len(theirs):
            raise TokenGroupError(
                f"sets over {len(mine)} and {len(theirs)} examples joined",
                expected="two sets of one prompt",
                fix="take both from the same prompt",
            )
        return TokenSet.of(*(merge(set(a), set(b)) for a, b in zip(mine, theirs)))

    def __or__(self, other: TokenSet) -> TokenSet:
        return self._join(other, set.union)

    __add__ = __or__

    def __and__(self, other: TokenSet) -> TokenSet:
        return self._join(other, set.intersection)

    def __sub__(self, other: TokenSet) -> TokenSet:
        return self._join(other, set.difference)


class PerExample(list):
    """One group for each example of a batch: `PerExample(["last", [3, 4], "subject"])`."""


Group = Union[str, int, TokenSet, PerExample, Sequence[int]]

_TERM = re.compile(r"\s*([+-]?)\s*([a-z_]+(?::[0-9]+(?:\.[0-9]+)?)?)\s*")


@lru_cache(maxsize=1024)
def parse_group(text: str) -> tuple[tuple[str, str], ...]:
    """A group's text as (sign, name) terms; knows nothing of any prompt.

    >>> parse_group("image-evidence")
    (('+', 'image'), ('-', 'evidence'))
    """
    terms: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        found = _TERM.match(text, at)
        if found is None or (terms and not found[1]):
            break
        terms.append((found[1] or "+", found[2]))
        at = found.end()
    if at < len(text) or not terms:
        raise TokenGroupError(
            f"token group {text!r} does not parse at {text[at:] or 'its start'!r}",
            expected="names joined by + and -, such as 'question+suffix' or 'image-evidence'",
            fix=f"use names like {', '.join(GROUP_NAMES)}",
        )
    return tuple(terms)


def resolve_group(
    group: Group, roles: dict[str, tuple[int, ...]], *, length: int, example: int, batch: int = 1
) -> tuple[int, ...]:
    """Sorted positions of `group` in one example.

    Parameters
    ----------
    group
        A name expression, an int, ints, a TokenSet or a PerExample.
    roles
        Positions for each name that has a meaning in this example.
    length
        Columns of the encoded batch; negative ints count from it.
    example, batch
        Which entry of a TokenSet or PerExample to take, and how many it must have.
    """
    if isinstance(group, str):
        chosen: set[int] = set()
        for sign, name in parse_group(group):
            if name not in roles:
                raise TokenGroupError(
                    f"token group {name!r} has no meaning in example {example} of this prompt",
                    expected="one of " + ", ".join(sorted(roles)),
                    fix="pick one of those; `subject`, `output` and `evidence` need the prompt's subject=, answer= "
                    "and evidence=",
                )
            chosen = chosen | set(roles[name]) if sign == "+" else chosen - set(roles[name])
        return tuple(sorted(chosen))
    if isinstance(group, PerExample | TokenSet):
        entries = group.per_example if isinstance(group, TokenSet) else group
        if len(entries) != batch:
            raise TokenGroupError(
                f"a group over {len(entries)} examples for a batch of {batch}",
                expected="one entry for each example of the prompt",
                fix="build it from this prompt",
            )
        if isinstance(group, TokenSet):
            return resolve_group(list(entries[example]), roles, length=length, example=example)
        if isinstance(entries[example], PerExample):
            raise TokenGroupError(
                "a PerExample inside a PerExample", expected="a flat PerExample", fix="unwrap the inner one"
            )
        return resolve_group(entries[example], roles, length=length, example=example)
    if isinstance(group, int) and not isinstance(group, bool):
        group = [group]
    if not isinstance(group, Iterable) or not all(isinstance(i, int) and not isinstance(i, bool) for i in group):
        raise TokenGroupError(
            f"token group {group!r}",
            expected="a name expression, an int, a list of ints, a TokenSet or a PerExample",
            fix="see docs/concepts.md, 'token groups'",
        )
    outside = [i for i in group if not -length <= i < length]
    if outside:
        raise TokenGroupError(
            f"positions {outside} in a batch of {length} columns",
            expected=f"ints from {-length} to {length - 1}",
            fix="check `prompt.inputs['input_ids'].shape[1]`",
        )
    return tuple(sorted({i % length for i in group}))
