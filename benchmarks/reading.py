"""Group mass of every head against a stock forward; residual caching against raw hooks, TransformerLens and nnsight.

A random 4-layer decoder of the Qwen3-VL class (hidden 1024, 16 heads of 64, MLP 3072), with 16 key/value heads (MHA) and
with 8 (GQA); one text sequence of N tokens. Without --quick also TransformerLens 4.3's run_with_cache and a hand-written
nnsight trace over the same weights, time and peak memory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import capture
import common
import nnsight
import torch

from mmlens import HookedVLM

LAYERS, HEADS = 4, 16
STREAMS = ["resid_pre", "resid_mid", "resid_post"]


def _inputs(n: int) -> dict:
    ids = torch.randint(0, 900, (1, n), generator=torch.Generator().manual_seed(n))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def against_stock(n: int, kv: int, rounds: int) -> dict:
    """Stock, group mass of four groups, raw hooks and residual caching, interleaved."""
    stock, vlm = capture.build(kv, LAYERS), HookedVLM.from_model(capture.build(kv, LAYERS))
    inputs, quarter = _inputs(n), n // 4
    groups = [list(range(i * quarter, (i + 1) * quarter)) for i in range(4)]

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

    plain()
    found = common.interleave(
        {
            "stock": plain,
            "mass": lambda: vlm.attention_mass(inputs, groups),
            "raw hooks": raw_hooks,
            "residuals": lambda: vlm.run_with_cache(inputs, STREAMS),
        },
        rounds,
    )
    vlm.close()
    return found


def against_others(n: int, kv: int, rounds: int) -> dict:
    """The same residual streams by mmlens, by TransformerLens's bridge and by an nnsight trace written by hand."""
    import tempfile

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import tiny
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer

    vlm = HookedVLM.from_model(capture.build(kv, LAYERS))
    by_hand = nnsight.NNsight(capture.build(kv, LAYERS))
    model = capture.build(kv, LAYERS)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
        words = AutoTokenizer.from_pretrained(folder)
        bridge = TransformerBridge.boot_transformers(folder, hf_model=model, tokenizer=words, device="cpu")
    inputs = _inputs(n)
    wanted = {f"blocks.{i}.hook_{s}" for i in range(LAYERS) for s in STREAMS}

    def trace():
        with torch.no_grad(), by_hand.trace(**inputs):
            kept = nnsight.save([])
            for layer in by_hand.model.language_model.layers:
                kept.append(layer.input.clone())
                kept.append(layer.post_attention_layernorm.input.clone())
                kept.append(layer.output.clone())
        return kept

    def lens():
        with torch.no_grad():
            return bridge.run_with_cache(inputs["input_ids"], names_filter=lambda name: name in wanted)

    cases = {"mmlens": lambda: vlm.run_with_cache(inputs, STREAMS), "nnsight": trace, "TransformerLens": lens}
    for case in cases.values():
        case()
    assert len(trace()) == 3 * LAYERS and wanted <= set(lens()[1])
    found = common.interleave(cases, rounds)
    vlm.close()
    return found


def main() -> None:
    chosen = common.options(__doc__)
    rows: list[common.Row] = []
    for n in (4096,) if chosen.quick else (2048, 4096):
        must = lambda value: value if n == 4096 else None
        rounds = 3 if chosen.quick or n == 4096 else 5
        for kind, kv in (("MHA", 16), ("GQA", 8)):
            shape = f"{kind} N={n} L={LAYERS} H={HEADS}/{kv} d=64"
            found = against_stock(n, kv, rounds)
            seconds = {name: f["seconds"] for name, f in found.items()}
            growth = {name: f["growth"] for name, f in found.items()}
            pair = lambda a, b: (seconds[a], seconds[b])
            rows.append(
                common.ratio(
                    "group mass of all layers / stock", shape, *pair("mass", "stock"), must=must(1.3), better="lower"
                )
            )
            rows.append(
                common.difference(
                    "memory of group mass above stock's", shape, growth["mass"], growth["stock"], must=None
                )
            )
            rows.append(
                common.ratio(
                    "residual streams / raw hooks",
                    shape,
                    *pair("residuals", "raw hooks"),
                    must=must(1.1),
                    better="lower",
                )
            )
        if not chosen.quick:
            found = against_others(n, 8, rounds)
            for name in ("nnsight", "TransformerLens"):
                shape = f"GQA N={n} L={LAYERS} H={HEADS}/8 d=64"
                a, b = found[name], found["mmlens"]
                rows.append(
                    common.ratio(
                        f"{name} / mmlens, residual streams",
                        shape,
                        a["seconds"],
                        b["seconds"],
                        must=None,
                        better="higher",
                    )
                )
                rows.append(
                    common.difference(f"memory of {name} above mmlens's", shape, a["growth"], b["growth"], must=None)
                )
    common.report(rows, chosen)


if __name__ == "__main__":
    main()
