"""Questions with answers and evidence; `load_task` finds one by name."""

from __future__ import annotations

from typing import Any

from mmlens.errors import OptionError, UnknownTaskError, closest
from mmlens.tasks.base import Task, TaskExample
from mmlens.tasks.scenes import ScenesTask

TASKS = {
    "scenes/image": lambda **options: ScenesTask("shapes", **options),
    "scenes/digits": lambda **options: ScenesTask("digits", **options),
}

__all__ = ["TASKS", "Task", "TaskExample", "load_task"]


def load_task(name: str, **options: Any) -> Task:
    """A task by name: "scenes/image" (coloured shapes) or "scenes/digits" (tinted handwriting).

    Parameters
    ----------
    name
        See `mmlens models` for the list.
    **options
        Of the task: `n_objects` (1 to 8, default 6) for the scenes.

    Examples
    --------
    >>> from mmlens import load_task
    >>> load_task("scenes/image").examples("rank", 1)[0].question
    'What color is the star?'
    """
    if not isinstance(name, str) or name not in TASKS:
        raise UnknownTaskError(
            f"no task is named {name!r}",
            expected=f"one of {', '.join(TASKS)}; closest: {closest(str(name), TASKS)}",
            fix="check the spelling, or pass a Task of your own (docs/tasks.md)",
        )
    try:
        return TASKS[name](**options)
    except TypeError as error:
        raise OptionError(
            f"options {options} for {name!r}: {error}", expected="the task's own options", fix="see docs/tasks.md"
        ) from None
