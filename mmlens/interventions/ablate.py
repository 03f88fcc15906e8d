"""Switching heads off, with the act named: the field's "masking" means several different things."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast, get_args

from mmlens.errors import OptionError
from mmlens.model.requests import HeadEdit, Mode, Request

if TYPE_CHECKING:
    from mmlens.model.hooked import HookedVLM

MODES: tuple[Mode, ...] = get_args(Mode)


@contextmanager
def ablate(vlm: HookedVLM, heads: Any, *, mode: str = "output_zero") -> Iterator[HookedVLM]:
    """Switch query heads off for the time of the block, in prefill and decoding; blocks nest.

    Every call of the model is affected, `vlm.hf` itself included.

    Parameters
    ----------
    heads
        A HeadSet, (layer, head) pairs, or {layer: heads}. Under grouped key/value heads the query head alone is
        cut: its group's keys and values stay for the others.
    mode
        "output_zero": the head adds nothing (its part of z is 0). "visual_mask": the head cannot look at picture
        tokens; its other weights are renormalised, and a row that sees nothing else gives 0. The first tests
        everything that the head does, the second only what it takes from the picture.

    Raises
    ------
    HeadError, OptionError

    Examples
    --------
    >>> from mmlens import HookedVLM, load_task
    >>> vlm, task = HookedVLM.from_pretrained("toy-qwen3-vl"), load_task("scenes/image")
    >>> with vlm.ablate([(0, 0)], mode="visual_mask"):
    ...     answers = task.evaluate(vlm, n=4).answers
    """
    if mode not in MODES:
        raise OptionError(f"mode={mode!r}", expected=f"one of {', '.join(MODES)}", fix="see docs/interventions.md")
    vlm.opened()
    table = vlm.head_table(heads)
    edits = {("decoder", layer): (HeadEdit(chosen, cast(Mode, mode)),) for layer, chosen in table.items() if chosen}
    with ExitStack() as stack:
        if mode == "visual_mask" and edits:
            stack.enter_context(vlm.picture_columns())
        stack.enter_context(vlm.requests.ask(Request(edits=edits)))
        yield vlm
