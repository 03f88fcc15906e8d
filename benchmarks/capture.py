"""What looking inside costs: idle, residual streams, and RAM rows against full eager attention.

A random 8-layer decoder (hidden 1024, 16 heads of 64, 8 KV heads) of the Qwen3-VL class, one text sequence of N tokens,
32 query rows. Eager attention with full weights is timed on one layer; without --quick once as a whole forward.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import common
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import eager_attention_forward

from mmlens import HookedVLM
from mmlens.metrics import ram
from mmlens.model.attention import Link, attach, attention
from mmlens.model.requests import Request, Requests

LAYERS, HIDDEN, HEADS, KV, HEAD, ROWS = 8, 1024, 16, 8, 64, 32


def build(kv: int = KV, layers: int = LAYERS) -> Qwen3VLForConditionalGeneration:
    config = Qwen3VLConfig(
        text_config=dict(
            vocab_size=1000,
            hidden_size=HIDDEN,
            intermediate_size=3 * HIDDEN,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=kv,
            head_dim=HEAD,
            max_position_embeddings=8192,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[12, 10, 10], mrope_interleaved=True),
        ),
        vision_config=dict(
            depth=1, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=4, out_hidden_size=HIDDEN,
            num_position_embeddings=64, deepstack_visual_indexes=[0],
        ),
        image_token_id=990, video_token_id=991, vision_start_token_id=992, vision_end_token_id=993,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()


def forwards(n: int, rounds: int, *, idle: bool) -> tuple[dict, dict]:
    """Whole forwards of stock, idle, residual caching, raw hooks and RAM of every head, interleaved."""
    stock = build()
    vlm = HookedVLM.from_model(build())
    generator = torch.Generator().manual_seed(n)
    ids = torch.randint(0, 900, (1, n), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    rows, evidence = list(range(n - ROWS, n)), list(range(n // 4, n // 4 + 64))
    scores = {}

    def plain():
        with torch.no_grad():
            return stock(**inputs, logits_to_keep=1).logits

    def raw_hooks():
        kept, handles = [], []
        for layer in stock.model.language_model.layers:
            note = lambda module, args, out=None: kept.append((args[0] if out is None else out).clone())
            handles.append(layer.register_forward_pre_hook(note))
            handles.append(layer.register_forward_hook(lambda m, a, o: kept.append(o.clone())))
            handles.append(layer.post_attention_layernorm.register_forward_pre_hook(note))
        with torch.no_grad():
            stock(**inputs)
        for handle in handles:
            handle.remove()
        return kept

    def keep_score(site, pattern):
        scores[site.layer] = ram(pattern, None, evidence)

    cases = {
        "stock": plain,
        "idle": lambda: vlm.reduce(inputs, {}),
        "ram": lambda: vlm.reduce(inputs, {"pattern": keep_score}, rows=rows),
        "raw hooks": raw_hooks,
        "residuals": lambda: vlm.run_with_cache(inputs, ["resid_pre", "resid_mid", "resid_post"]),
    }
    if not idle:
        del cases["idle"]
    plain()
    found = common.interleave(cases, rounds)
    assert len(scores) == LAYERS
    vlm.close()
    return found, scores


def attention_only(n: int, rounds: int) -> dict:
    """One layer's attention: ours with RAM of 32 rows against eager with full weights, given the same q, k, v."""
    generator = torch.Generator().manual_seed(n)
    draw = lambda heads: torch.randn(1, heads, n, HEAD, generator=generator)
    q, k, v = draw(HEADS), draw(KV), draw(KV)
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups, module.training = True, HEADS // KV, False
    requests, address = Requests(), ("decoder", 0)
    attach(module, Link(requests, address))
    evidence, rows = list(range(n // 4, n // 4 + 64)), list(range(n - ROWS, n))
    seen = {}
    module.hook_pattern.register_forward_hook(lambda m, a, out: seen.update(ram=ram(out, None, evidence)))
    mask = torch.zeros(1, 1, n, n).masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))

    def ours():
        request = Request({address: frozenset({"pattern"})}, rows=(tuple(rows),))
        with torch.no_grad(), requests.ask(request):
            return attention(module, q, k, v, None, scaling=HEAD**-0.5)[0]

    def eager():
        with torch.no_grad():
            out, weights = eager_attention_forward(module, q, k, v, mask, scaling=HEAD**-0.5)
            seen["eager"] = ram(weights, rows, evidence)
            return out

    ours(), eager()
    assert torch.allclose(seen["ram"], seen["eager"], atol=1e-5)
    return common.interleave({"ours": ours, "eager": eager}, rounds)


def main() -> None:
    chosen = common.options(__doc__)
    rows: list[common.Row] = []
    for n in (4096,) if chosen.quick else (512, 2048, 4096):
        binding = n == 4096
        must = lambda value: value if binding else None
        shape = f"N={n} L={LAYERS} H={HEADS}/{KV} d={HEAD}"
        rounds = 3 if chosen.quick else {512: 15, 2048: 7, 4096: 5}[n]
        one = attention_only(n, rounds)
        rows.append(
            common.ratio("RAM rows against eager with full weights, attention only (eager / ours)", f"N={n} one layer",
                         one["eager"]["seconds"], one["ours"]["seconds"], must=must(4.0), better="higher")
        )  # fmt: skip
        rows.append(
            common.difference("memory above eager's (one layer; negative is less)", f"N={n} one layer",
                              one["ours"]["growth"], one["eager"]["growth"], must=None)
        )  # fmt: skip
        found, _ = forwards(n, rounds, idle=not chosen.quick)
        seconds = {name: f["seconds"] for name, f in found.items()}
        growth = {name: f["growth"] for name, f in found.items()}
        if "idle" in seconds:
            rows.append(
                common.ratio("idle / stock", shape, seconds["idle"], seconds["stock"], must=None, better="lower")
            )
        rows.append(
            common.ratio(
                "RAM of all layers and heads / stock",
                shape,
                seconds["ram"],
                seconds["stock"],
                must=must(1.15),
                better="lower",
            )
        )
        rows.append(
            common.difference(
                "memory growth of RAM above stock's", shape, growth["ram"], growth["stock"], must=must(64.0)
            )
        )
        rows.append(
            common.ratio(
                "residual streams / raw hooks with clones",
                shape,
                seconds["residuals"],
                seconds["raw hooks"],
                must=must(1.1),
                better="lower",
            )
        )
        if binding and not chosen.quick:
            model = build()
            model.set_attn_implementation("eager")
            ids = torch.randint(0, 900, (1, n))
            with torch.no_grad():
                whole = common.interleave(
                    {"eager": lambda: model(input_ids=ids, output_attentions=True, logits_to_keep=1)}, 1
                )["eager"]
            rows.append(
                common.ratio(
                    "whole eager forward with attentions / RAM (once)",
                    shape,
                    whole["seconds"],
                    seconds["ram"][:1],
                    must=None,
                    better="higher",
                )
            )
    common.report(rows, chosen)


if __name__ == "__main__":
    main()
