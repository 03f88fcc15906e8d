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


LLAMA = dict(
    attn="self_attn",
    q="q_proj k_proj v_proj",
    o="o_proj",
    ln1="input_layernorm",
    ln2="post_attention_layernorm",
    mlp="gate_proj down_proj",
    kv=2,
    heads=6,
)
GEMMA = {**LLAMA, "ln2": "pre_feedforward_layernorm", "added": "post_attention_layernorm post_feedforward_layernorm"}
CLIP = dict(
    attn="self_attn",
    q="q_proj k_proj v_proj",
    o="out_proj",
    ln1="layer_norm1",
    ln2="layer_norm2",
    mlp="fc1 fc2",
    kv=3,
    heads=3,
)
INTERN = {**CLIP, "attn": "attention", "o": "projection_layer", "ln1": "layernorm_before", "ln2": "layernorm_after"}
INTERN["scale"] = "lambda_1 lambda_2"
QWEN = dict(attn="attn", q="qkv", o="proj", ln1="norm1", ln2="norm2", mlp="fc1 fc2", kv=3, heads=3, packed=True)
QWEN25, QWEN3 = {**QWEN, "mlp": "gate_proj down_proj"}, {**QWEN, "mlp": "linear_fc1 linear_fc2"}

# family: (language model, decoder blocks, tower blocks' path, tower blocks, projector)
PLACES = {
    "qwen2-vl": ("language_model", LLAMA, "visual.blocks", QWEN, "visual.merger"),
    "qwen2.5-vl": ("language_model", LLAMA, "visual.blocks", QWEN25, "visual.merger"),
    "qwen3-vl": ("language_model", LLAMA, "visual.blocks", QWEN3, "visual.merger"),
    "qwen3-vl-moe": ("language_model", LLAMA, "visual.blocks", QWEN3, "visual.merger"),
    "llava-1.5": ("language_model", LLAMA, "vision_tower.encoder.layers", CLIP, "multi_modal_projector"),
    "llava-next": ("language_model", LLAMA, "vision_tower.encoder.layers", CLIP, "multi_modal_projector"),
    "llava-onevision": ("language_model", LLAMA, "vision_tower.encoder.layers", CLIP, "multi_modal_projector"),
    "internvl": ("language_model", LLAMA, "vision_tower.encoder.layer", INTERN, "multi_modal_projector"),
    "gemma3": ("language_model", GEMMA, "vision_tower.encoder.layers", CLIP, "multi_modal_projector"),
    "idefics3": ("text_model", LLAMA, "vision_model.encoder.layers", CLIP, "connector"),
    "smolvlm": ("text_model", LLAMA, "vision_model.encoder.layers", CLIP, "connector"),
}
PACKED = tuple(name for name, places in PLACES.items() if places[3].get("packed"))
DEEPSTACK = ("qwen3-vl", "qwen3-vl-moe")


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

    def stack(prefix, blocks, at, d=8):
        lift = (lambda x: x.unsqueeze(0)) if at.get("packed") else (lambda x: x)
        heads, kv = at["heads"], at["kv"]
        for i, b in enumerate(blocks):
            n = f"{prefix}blocks.{i}."
            a, mlp = getattr(b, at["attn"]), b.mlp
            split = lambda h: lambda x: lift(x).reshape(*lift(x).shape[:2], h, d)
            added = [getattr(b, m) for m in at["added"].split()] if "added" in at else [a, mlp]
            scales = [getattr(b, s) for s in at["scale"].split()] if "scale" in at else [None, None]
            scaled = lambda s: lift if s is None else (lambda x: lift(x * s))
            inp(n + "hook_resid_pre", b, lift)
            out(n + "hook_resid_post", b, lift)
            out(n + "hook_attn_out", added[0], scaled(scales[0]))
            out(n + "hook_mlp_out", added[1], scaled(scales[1]))
            inp(n + "hook_resid_mid", getattr(b, at["ln2"]), lift)
            out(n + "ln1.hook_normalized", getattr(b, at["ln1"]), lift)
            out(n + "ln2.hook_normalized", getattr(b, at["ln2"]), lift)
            inp(n + "attn.hook_z", getattr(a, at["o"]), split(heads))
            before, after = at["mlp"].split()
            if hasattr(mlp, before):
                out(n + "mlp.hook_pre", getattr(mlp, before), lift)
                inp(n + "mlp.hook_post", getattr(mlp, after), lift)
            if hasattr(mlp, "up_proj"):
                out(n + "mlp.hook_pre_linear", mlp.up_proj, lift)
            if at["q"] == "qkv":
                for j, letter in enumerate("qkv"):
                    part = lambda x, j=j: split(heads)(x[..., j * heads * d : (j + 1) * heads * d])
                    out(f"{n}attn.hook_{letter}", a.qkv, part)
            else:
                for letter, h in (("q", heads), ("k", kv), ("v", kv)):
                    out(f"{n}attn.hook_{letter}", getattr(a, f"{letter}_proj"), split(h))
            a.__dict__["_oracle_name"] = n

    text, decoder, tower_path, tower, projector = PLACES[family]
    language = model.model.get_submodule(text)
    stack("", language.layers, decoder)
    stack("vision.", model.model.get_submodule(tower_path), tower)
    lift = (lambda x: x.unsqueeze(0)) if tower.get("packed") else (lambda x: x)
    out("projector.hook_out", model.model.get_submodule(projector), lift)
    if family in DEEPSTACK:
        for i, merger in enumerate(model.model.visual.deepstack_merger_list):
            out(f"projector.deepstack.{i}.hook_out", merger, lift)
    inp("hook_embed", language.layers[0])
    out("ln_final.hook_normalized", language.norm)
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
    """A single prompt, a left-padded batch of two with pictures of different sizes, and one with two pictures."""
    single = vlm.prompt(QUESTIONS[0], images=[tiny.picture()], subject="star")
    batch = vlm.prompt(
        list(QUESTIONS),
        images=[[tiny.picture(seed=1)], [tiny.picture(40, 32, seed=2)]],
        subject=["star", "square"],
    )
    several = vlm.prompt(QUESTIONS[0], images=[tiny.picture(), tiny.picture(40, 32, seed=2)], subject="star")
    return {"single": single, "batch": batch, "several": several}
