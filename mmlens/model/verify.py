"""verify: what anybody with real weights runs first. Every check compares the wrapped model with itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmlens.errors import MMLensError, NoProcessorError
from mmlens.model.access import norm_gain
from mmlens.model.prompt import Prompt
from mmlens.model.reading import HALF

if TYPE_CHECKING:
    from mmlens.model.engine import PromptLike
    from mmlens.model.hooked import HookedVLM


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    ok: bool
    told: str


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    Attributes
    ----------
    checks
        One for each thing that was tried, in order.
    model
        The model's name and family.
    """

    model: str
    checks: tuple[Check, ...] = field(repr=False)

    @property
    def ok(self) -> bool:
        """Whether every check held."""
        return all(check.ok for check in self.checks)

    def __repr__(self) -> str:
        failed = [check.name for check in self.checks if not check.ok]
        told = f"{', '.join(failed)} failed" if failed else "all held"
        return f"Report({self.model}: {len(self.checks)} checks, {told})"

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [f"{'ok  ' if c.ok else 'FAIL'}  {c.name:{width}}  {c.told}" for c in self.checks]
        return "\n".join([self.model, *lines])


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def built_in_picture() -> Image.Image:
    """A picture with edges, colours and noise; the same every time."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:96, 0:128]
    pixels = np.stack([x * 2, y * 2, (x // 16 + y // 16) % 2 * 255], -1)
    return Image.fromarray((pixels + rng.integers(-20, 20, pixels.shape)).clip(0, 255).astype(np.uint8))


def verify(vlm: HookedVLM, prompt: PromptLike | None = None) -> Report:
    """Check a model against itself: idle parity, identities, every hook causal, token roles, patterns, generation.

    Takes a few dozen forwards with one small picture; nothing of the model is changed.

    Parameters
    ----------
    prompt
        What to run; by default a question about a built-in picture.

    Returns
    -------
    Report
        `.ok`, `.checks`; `print(report)` shows a table.

    Examples
    --------
    >>> from mmlens import HookedVLM
    >>> HookedVLM.from_pretrained("toy-qwen3-vl").verify().ok
    True
    """
    if prompt is None:
        if vlm.processor is None:
            raise NoProcessorError(
                "verify() of a model that was wrapped without its processor",
                expected="a processor, or a prompt",
                fix="vlm.verify(inputs) with the processor's own output",
            )
        words = "what color is the star ?"
        prompt = vlm.prompt(words, images=[built_in_picture()])
    runs = vlm.as_prompt(prompt)
    checks = [Check(name, *_tried(check, vlm, runs)) for name, check in _CHECKS.items()]
    return Report(f"{vlm.name} ({vlm.family.name}, {str(vlm.dtype).removeprefix('torch.')})", tuple(checks))


def _tried(check: Callable[[HookedVLM, Prompt], tuple[bool, str]], vlm: HookedVLM, prompt: Prompt) -> tuple[bool, str]:
    try:
        return check(vlm, prompt)
    except (MMLensError, RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        return False, f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _worst(pairs: Iterator[tuple[str, float]]) -> tuple[str, float]:
    return max(pairs, key=lambda p: p[1], default=("", 0.0))


def _idle(vlm: HookedVLM, prompt: Prompt) -> tuple[bool, str]:
    """The wrapped model against itself unwrapped: same bits, same operations."""
    inputs = vlm.model_inputs(prompt)
    with torch.no_grad(), _Calls() as wrapped:
        got = vlm.hf(**inputs).logits
    with vlm.opened().stock(), torch.no_grad(), _Calls() as stock:
        want = vlm.hf(**inputs).logits
    same = bool(torch.equal(got, want)) and wrapped.names == stock.names
    return same, f"{len(stock.names)} operations, largest difference {float((got - want).abs().max()):.1e}"


def _finite(vlm: HookedVLM, prompt: Prompt) -> tuple[bool, str]:
    logits = vlm(prompt)[prompt.inputs["attention_mask"].bool()]
    return bool(logits.isfinite().all()), f"logits up to {float(logits.abs().max()):.3g}"


def _roles(vlm: HookedVLM, prompt: Prompt) -> tuple[bool, str]:
    """Every placeholder belongs to one picture, and the features go where the roles say."""
    columns = [c for item in prompt.items for c in item.columns]
    if not prompt.items:
        return True, "no picture in this prompt"
    _, cache = vlm.run_with_cache(prompt, ["hook_embed"])
    words = vlm.hf.get_submodule(vlm.family.embed).weight
    item = prompt.items[0]
    ids = prompt.inputs["input_ids"][item.example, list(item.columns)].to(words.device)
    plain = bool((cache["hook_embed"][item.example, list(item.columns)] == words[ids]).all(-1).any())
    return len(set(columns)) == len(columns) and not plain, f"{len(prompt.items)} pictures, {len(columns)} tokens"


def _reading(vlm: HookedVLM, prompt: Prompt) -> tuple[bool, str]:
    logits, cache = vlm.run_with_cache(prompt, lambda name: not name.startswith("vision.") or "pattern" not in name)
    return bool(torch.equal(logits, vlm(prompt))), f"{len(cache)} hooks read, logits as before"


def _identities(vlm: HookedVLM, prompt: Prompt) -> tuple[bool, str]:
    names = ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"]
    names += [f"vision.{n}" for n in names] if prompt.has_picture else []
    _, cache = vlm.run_with_cache(prompt, names)

    def errors() -> Iterator[tuple[str, float]]:
        for prefix, n in (("", vlm.n_layers), *((("vision.", vlm.tower.n_layers),) if prompt.has_picture else ())):
            for layer in range(n):
                for a, b, c in (("resid_pre", "attn_out", "resid_mid"), ("resid_mid", "mlp_out", "resid_post")):
                    left, added, right = (cache[f"{prefix}{x}", layer] for x in (a, b, c))
                    error = (left + added - right).float().abs().max() / right.float().abs().max()
                    yield f"{prefix}{c} {layer}", float(error)

    where, worst = _worst(errors())
    return worst <= (1e-5 if vlm.dtype not in HALF else 1e-2), f"worst {worst:.1e} at {where}"


def _norms(vlm: HookedVLM, prompt: Prompt) -> tuple[bool, str]:
    """The final norm is what its scale and gain say."""
    last = f"blocks.{vlm.n_layers - 1}.hook_resid_post"
    _, cache = vlm.run_with_cache(prompt, ["ln_final.hook_scale", "ln_final.hook_normalized", last])
    norm = vlm.hf.get_submodule(vlm.family.final_norm)
    gain = norm_gain(norm, vlm.family.decoder.norm_offset).detach().float().to(cache[last].device)
    stream = cache[last].float()
    if isinstance(norm, torch.nn.LayerNorm):
        stream = stream - stream.mean(-1, keepdim=True)
    error = stream / cache["ln_final.hook_scale"] * gain - cache["ln_final.hook_normalized"].float()
    bias = getattr(norm, "bias", None)
    error = error if bias is None else error + bias.detach().float()
    worst = float(error.abs().max() / cache["ln_final.hook_normalized"].float().abs().max())
    return worst <= (1e-5 if vlm.dtype not in HALF else 2e-2), f"worst {worst:.1e}"


def _patterns(vlm: HookedVLM, prompt: Prompt) -> tuple[bool, str]:
    """Rows sum to one, and z is the pattern times the values: the pattern is the one that acted."""
    real = prompt.inputs["attention_mask"].bool()

    def weighted(name: str, cache: dict[str, Tensor]) -> float:
        pattern, v, z = cache[f"{name}hook_pattern"], cache[f"{name}hook_v"], cache[f"{name}hook_z"]
        v = v.repeat_interleave(z.shape[2] // v.shape[2], 2)
        made = torch.einsum("bhqk,bkhd->bqhd", pattern, v.float())
        error = (made - z.float())[real].abs().max() / z.float()[real].abs().max()
        return max(float(error), float((pattern.sum(-1).transpose(1, 2)[real] - 1).abs().max()))

    def errors() -> Iterator[tuple[str, float]]:
        for layer in range(vlm.n_layers):
            name = f"blocks.{layer}.attn."
            _, cache = vlm.run_with_cache(prompt, [f"{name}hook_{x}" for x in ("pattern", "v", "z")])
            yield f"layer {layer}", weighted(name, dict(cache))

    where, worst = _worst(errors())
    return worst <= (1e-4 if vlm.dtype not in HALF else 3e-2), f"worst {worst:.1e} at {where}"


def _causal(vlm: HookedVLM, prompt: Prompt) -> tuple[bool, str]:
    """An edit at every writable site that counts as used reaches the logits."""
    clean = vlm(prompt)
    silent, tried = [], 0
    for site in vlm.sites:
        first_and_last = site.layer in (None, 0, (vlm.tower if site.tower else vlm.decoder).n_layers - 1)
        if not site.writable or not first_and_last or (site.picture_only and not prompt.has_picture):
            continue
        tried += 1
        logits = vlm.run_with_hooks(prompt, [(site.name, _nudge)])
        if torch.equal(logits, clean) == site.used:
            silent.append(site.name)
    told = f"{tried} sites of the first and last blocks"
    return not silent, told + (f"; wrong: {', '.join(silent[:3])}" if silent else "")


def _nudge(value: Tensor, hook: Any) -> Tensor:
    finite = torch.where(value.isfinite(), value, torch.zeros_like(value))
    return torch.where(value.isfinite(), value.flip(-1) * 1.5 + 0.1 * finite.abs().mean(), value)


def _sum_of_parts(vlm: HookedVLM, prompt: Prompt) -> tuple[bool, str]:
    logits, cache = vlm.run_with_cache(
        prompt, [*_SUM, *(["deepstack_in"] if prompt.has_picture and _deep(vlm) else [])]
    )
    real = prompt.inputs["attention_mask"].bool()
    final = cache["resid_post", -1].float()[real]
    stream = float(((cache.decompose_resid().sum(0)[real] - final).norm(dim=-1) / final.norm(dim=-1)).max())
    lens = float((cache.logit_lens(layers=[-1])[0] - logits.float())[real].abs().max() / logits.float().abs().max())
    loose = 0.05 if vlm.dtype in HALF else 1e-5
    return stream <= loose and lens <= loose, f"stream {stream:.1e}, logit lens {lens:.1e}"


_SUM = ("hook_embed", "attn_out", "mlp_out", "resid_pre", "resid_post", "ln_final.hook_scale")


def _deep(vlm: HookedVLM) -> bool:
    return vlm.family.deepstack_layers(vlm.config) > 0


def _generates(vlm: HookedVLM, prompt: Prompt) -> tuple[bool, str]:
    runs = prompt.unforced()
    with torch.no_grad():
        plain = vlm.hf.generate(**vlm.model_inputs(runs), max_new_tokens=3, do_sample=False)[:, runs.n_columns :]
    captured = vlm.generate(prompt, max_new_tokens=3, names_filter=["resid_post"])
    return bool(torch.equal(plain, captured.tokens)), f"{plain.shape[1]} tokens with capture, the same as without"


_CHECKS: dict[str, Callable[[HookedVLM, Prompt], tuple[bool, str]]] = {
    "idle parity": _idle,
    "finite": _finite,
    "token roles": _roles,
    "reading": _reading,
    "residual identities": _identities,
    "final norm": _norms,
    "patterns": _patterns,
    "every site causal": _causal,
    "sum of parts": _sum_of_parts,
    "generation": _generates,
}
