"""What stock transformers computes, through plain torch hooks: the other side of every parity test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class Operations(TorchDispatchMode):
    """Records every aten call, and the largest tensor made."""

    def __init__(self):
        super().__init__()
        self.calls, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append(str(func))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return out


def run(model, inputs):
    """Logits of the model itself."""
    with torch.no_grad():
        return model(**inputs).logits


@contextlib.contextmanager
def recorded(model, family: str) -> Iterator[dict]:
    """Every stream of a stock model by our names, through plain torch hooks and a recording attention function.

    Written from the models' own source, module by module, independent of mmlens's tables.
    """
    values, handles = {}, []

    def first(x):
        return x[0] if isinstance(x, tuple) else x

    def out(name, module, shape=lambda x: x):
        handles.append(module.register_forward_hook(lambda m, a, o: values.__setitem__(name, shape(first(o)).clone())))

    def inp(name, module, shape=lambda x: x):
        def hook(m, args, kwargs):
            x = args[0] if args else next(iter(kwargs.values()))
            values[name] = shape(x).clone()

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def stack(prefix, blocks, attn, o, ln1, ln2, mlp_in, mlp_out, heads, kv, d, lift, fused):
        for i, b in enumerate(blocks):
            n = f"{prefix}blocks.{i}."
            a, mlp = getattr(b, attn), b.mlp
            split = lambda h: lambda x: lift(x).reshape(*lift(x).shape[:2], h, d)
            inp(n + "hook_resid_pre", b, lift)
            out(n + "hook_resid_post", b, lift)
            out(n + "hook_attn_out", a, lift)
            out(n + "hook_mlp_out", mlp, lift)
            inp(n + "hook_resid_mid", getattr(b, ln2), lift)
            out(n + "ln1.hook_normalized", getattr(b, ln1), lift)
            out(n + "ln2.hook_normalized", getattr(b, ln2), lift)
            inp(n + "attn.hook_z", getattr(a, o), split(heads))
            out(n + "mlp.hook_pre", getattr(mlp, mlp_in), lift)
            inp(n + "mlp.hook_post", getattr(mlp, mlp_out), lift)
            if hasattr(mlp, "up_proj"):
                out(n + "mlp.hook_pre_linear", mlp.up_proj, lift)
            if fused:
                for j, letter in enumerate("qkv"):
                    part = lambda x, j=j: split(heads)(x[..., j * heads * d : (j + 1) * heads * d])
                    out(f"{n}attn.hook_{letter}", a.qkv, part)
            else:
                for letter, h in (("q", heads), ("k", kv), ("v", kv)):
                    out(f"{n}attn.hook_{letter}", getattr(a, f"{letter}_proj"), split(h))
            a.__dict__["_oracle_name"] = n

    same = lambda x: x
    text = ("self_attn", "o_proj", "input_layernorm", "post_attention_layernorm", "gate_proj", "down_proj", 6, 2, 8)
    stack("", model.model.language_model.layers, *text, same, False)
    if family == "qwen3":
        visual = model.model.visual
        lift = lambda x: x.unsqueeze(0)
        tower = ("attn", "proj", "norm1", "norm2", "linear_fc1", "linear_fc2", 3, 3, 8)
        stack("vision.", visual.blocks, *tower, lift, True)
        out("projector.hook_out", visual.merger, lift)
        for i, merger in enumerate(visual.deepstack_merger_list):
            out(f"projector.deepstack.{i}.hook_out", merger, lift)
    else:
        tower = ("self_attn", "out_proj", "layer_norm1", "layer_norm2", "fc1", "fc2", 3, 3, 8)
        stack("vision.", model.model.vision_tower.encoder.layers, *tower, same, False)
        out("projector.hook_out", model.model.multi_modal_projector)
    inp("hook_embed", model.model.language_model.layers[0])
    out("ln_final.hook_normalized", model.model.language_model.norm)
    out("hook_logits", model.lm_head)

    def spy(module, query, key, value, attention_mask, scaling=None, **kw):
        name = module.__dict__.get("_oracle_name")
        calls = values.setdefault(name + "calls", [])
        calls.append((query.clone(), key.clone(), value.clone(), attention_mask, scaling, kw.get("is_causal")))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, scaling=scaling, **kw)

    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    ALL_ATTENTION_FUNCTIONS.register("oracle_spy", spy)
    ALL_MASK_ATTENTION_FUNCTIONS.register("oracle_spy", sdpa_mask)
    model.set_attn_implementation("oracle_spy")
    try:
        yield values
    finally:
        for handle in handles:
            handle.remove()
        model.set_attn_implementation("sdpa")


def exact_pattern(query, key, mask, scaling, causal: bool):
    """Softmax in float64 of the q, k and mask that the attention function received; rows without keys are 0."""
    q, k = query.double(), key.double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.transpose(-1, -2) * scaling
    n, m = scores.shape[-2:]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif causal and n > 1:
        scores = scores.masked_fill(~torch.ones(n, m, dtype=torch.bool).tril(m - n), float("-inf"))
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    return torch.softmax(scores, -1).masked_fill(empty, 0)


QUESTIONS = ("what color is the star?", "is the square red and the circle blue or what?")


def prompts(vlm):
    """A single prompt, and a left-padded batch of two with pictures of different sizes."""
    single = vlm.prompt(QUESTIONS[0], images=[tiny.picture()], subject="star")
    batch = vlm.prompt(
        list(QUESTIONS),
        images=[[tiny.picture(seed=1)], [tiny.picture(40, 32, seed=2)]],
        subject=["star", "square"],
    )
    return {"single": single, "batch": batch}
