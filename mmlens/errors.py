"""Every error a user can meet: what was given, what was expected, what to do; one page each in docs/errors/."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import partial


class MMLensError(Exception):
    """Base of all errors that mmlens raises on purpose.

    Parameters
    ----------
    given
        What was wrong, with the value that was given.
    expected
        What would have been right.
    fix
        What to do now.
    """

    def __init__(self, given: str, *, expected: str, fix: str) -> None:
        self.given, self.expected, self.fix = given, expected, fix
        super().__init__(given, expected, fix)

    def __reduce__(self) -> tuple:
        return partial(type(self), expected=self.expected, fix=self.fix), (self.given,)

    def __str__(self) -> str:
        page = type(self).__name__
        return f"{self.given}\n  Expected: {self.expected}\n  Do: {self.fix}\n  More: docs/errors/{page}.md"


def closest(name: str, names: Iterable[str], n: int = 3) -> str:
    """The names most like `name`, for an error's last line."""
    found = difflib.get_close_matches(name, list(names), n=n, cutoff=0.4)
    return ", ".join(repr(f) for f in found) if found else "none is close"


# Loading a model
class ModelNotFoundError(MMLensError):
    """A name that is no embedded model, no local folder and no reachable hub id."""


class UnknownFamilyError(MMLensError):
    """A checkpoint whose architecture no family file describes."""


class AlreadyWrappedError(MMLensError):
    """A second HookedVLM over one Hugging Face module."""


class ClosedError(MMLensError):
    """A HookedVLM used after `close()`."""


class NoProcessorError(MMLensError):
    """A question asked of a model that was wrapped without its processor."""


# Hooks
class UnknownHookError(MMLensError):
    """A hook name, glob or short name that matches nothing."""


class HookNotReachedError(MMLensError):
    """A hook that this run never executes."""


class NoPictureError(HookNotReachedError):
    """A tower or projector hook asked of a prompt without a picture."""


class ReadOnlyHookError(MMLensError):
    """A write to a derived value."""


class HookValueError(MMLensError):
    """A hook function that gave back something that cannot take the activation's place."""


class PatternTooLargeError(MMLensError):
    """Scores or a pattern that would fill the memory."""


class AttentionChangedError(MMLensError):
    """An attention implementation that was switched while the model was wrapped."""


class GradientError(MMLensError):
    """A gradient that is not there: of a run without `grad=True`, before `backward()`, or of a derived value."""


class NonFiniteError(MMLensError):
    """Infinities or NaN that a model in half precision produced."""


class CacheError(MMLensError):
    """A cache that lacks what a computation needs, or a file that is no saved cache."""


class UnsupportedAttentionError(MMLensError):
    """An attention variant (soft cap, sinks, position bias) whose pattern mmlens cannot compute."""


# Prompts
class PromptError(MMLensError):
    """A prompt that cannot be built from what was given."""


class PictureError(MMLensError):
    """A picture that cannot be read."""


class PictureCountError(MMLensError):
    """A number of pictures at odds with the number of picture marks in the prompt."""


class PlaceholderError(MMLensError):
    """A number of picture tokens at odds with the picture's features."""


class MissingTokenTypesError(MMLensError):
    """Inputs without `mm_token_type_ids` for a family that builds positions from them."""


class RightPaddingError(MMLensError):
    """A batch padded on the right."""


class PictureTokenError(MMLensError):
    """A processor and a model that disagree on the id of the picture token."""


class UnknownWordError(MMLensError):
    """A word outside a closed vocabulary."""


class TokenGroupError(MMLensError):
    """A token group that does not parse, or has no meaning in this prompt."""


class RegionError(MMLensError):
    """A region that is empty, lies outside its picture, or is given in other units than it says."""


class GeometryError(MMLensError):
    """A picture whose tokens are not where its family's arithmetic puts them, or a processor of no known family."""


class VideoError(MMLensError):
    """A video that cannot be decoded, or frames of it that do not exist."""


# Heads and scores
class HeadError(MMLensError):
    """Heads, or a number of heads, that this model does not have."""


class MetricError(MMLensError):
    """Numbers or options for which a metric has no sound answer."""


# Tasks, scans, options
class UnknownTaskError(MMLensError):
    """A task name that nothing registers."""


class DataError(MMLensError):
    """A data set of another layout than its reader expects, or with too few usable records."""


class OptionError(MMLensError):
    """An option with a value that does not exist, or options that contradict each other."""


class RunFolderError(MMLensError):
    """A run directory of another scan, or one that cannot be read."""
