"""Where each hook name sits in each family's modules, as text: what docs/hooks.md is made of."""

from __future__ import annotations

from mmlens.families.base import Family, Stack

DRAWING = """\
 hook_embed (words, with the picture's features in place)
     |
     +---------------- blocks.L.hook_resid_pre
     |                       |
     |                      ln1 ......... ln1.hook_scale, ln1.hook_normalized
     |                    /  |  \\
     |                   q   k   v ...... attn.hook_q, hook_k, hook_v
     |                   |   |   |        (q/k norm, rotary)
     |                  rot rot  | ...... attn.hook_rot_q, hook_rot_k
     |                    \\ /    |
     |                  q . k    | ...... attn.hook_attn_scores, hook_pattern
     |                      \\   /
     |                        z ......... attn.hook_z   (head outputs)
     |                       W_O ........ attn.hook_result   (by head; read only)
     |                        |           (norm or scale behind it, where there is one)
     + <---------------------- .......... hook_attn_out
     |
     +---------------- blocks.L.hook_resid_mid
     |                       |
     |                      ln2 ......... ln2.hook_scale, ln2.hook_normalized
     |                    gate, up ...... mlp.hook_pre, mlp.hook_pre_linear
     |                     product ...... mlp.hook_post
     |                      down
     + <---------------------- .......... hook_mlp_out
     |
     +---------------- blocks.L.hook_resid_post
     |
     + <------ hook_deepstack_in (Qwen3-VL, after the first blocks)
     |
 ln_final ............................... ln_final.hook_scale, ln_final.hook_normalized
     |
 hook_logits
"""


def stack_map(stack: Stack, prefix: str) -> list[tuple[str, str]]:
    """(hook name, which side of which module) of one block, `{L}` standing for its number."""
    block = f"{stack.blocks}.{{L}}"
    at = lambda path: f"{block}.{path}"  # noqa: E731
    attn = at(stack.attn)
    if len(stack.qkv) == 1:
        projections = [
            (f"attn.hook_{x}", f"output of {attn}.{stack.qkv[0]}, its {i} third")
            for x, i in zip("qkv", ("first", "second", "last"))
        ]
    else:
        projections = [(f"attn.hook_{x}", f"output of {attn}.{path}") for x, path in zip("qkv", stack.qkv)]

    def added(part: str, sublayer: str, scale: str | None) -> str:
        return f"output of {at(part or sublayer)}" + (f", times {scale}" if scale else "")

    rows = [
        ("hook_resid_pre", f"input of {block}"),
        ("ln1.hook_normalized", f"output of {at(stack.ln1)}"),
        *projections,
        ("attn.hook_rot_q, hook_rot_k", "what the attention function is given"),
        ("attn.hook_attn_scores, hook_pattern", "inside the attention function, where asked for"),
        ("attn.hook_z", f"input of {attn}.{stack.out}"),
        ("hook_attn_out", added(stack.attn_added or "", stack.attn, stack.attn_scale)),
        ("hook_resid_mid", f"input of {at(stack.ln2)}; written in place"),
        ("ln2.hook_normalized", f"output of {at(stack.ln2)}"),
        ("mlp.hook_pre", f"output of {at(stack.mlp)}.{stack.mlp_in}"),
        *([("mlp.hook_pre_linear", f"output of {at(stack.mlp)}.{stack.mlp_linear}")] if stack.mlp_linear else []),
        ("mlp.hook_post", f"input of {at(stack.mlp)}.{stack.mlp_out}"),
        ("hook_mlp_out", added(stack.mlp_added or "", stack.mlp, stack.mlp_scale)),
        ("hook_resid_post", f"output of {block}"),
    ]
    return [(f"{prefix}blocks.{{L}}.{name}", where) for name, where in rows]


def family_map(family: Family) -> list[tuple[str, str]]:
    """(hook name, where) of a whole family, tower first."""
    deepstack = (
        [("projector.deepstack.{i}.hook_out", f"output of {family.deepstack}.{{i}}")] if family.deepstack else []
    )
    return [
        *stack_map(family.tower, "vision."),
        ("projector.hook_out", f"output of {family.projector}"),
        *deepstack,
        ("hook_embed", f"input of {family.decoder.blocks}.0"),
        *stack_map(family.decoder, ""),
        ("ln_final.hook_normalized", f"output of {family.final_norm}"),
        ("hook_logits", f"output of {family.unembed}"),
    ]


def page() -> str:
    """docs/hooks.md."""
    from mmlens.families import FAMILIES

    lines = [
        "# Hooks of each family",
        "",
        "The same names sit in the same places of every block, in the decoder and (under `vision.`) in the tower:",
        "",
        "```text",
        DRAWING.rstrip("\n"),
        "```",
        "",
        "Which module that is differs. This page is made from the code: `python -m mmlens.families.hookmap`; "
        "`mmlens hooks MODEL` lists a loaded model's own.",
    ]
    for family in FAMILIES:
        lines += [
            "",
            f"## {family.name}",
            "",
            f"`{'`, `'.join(family.architectures)}`",
            "",
            "| hook | where |",
            "|---|---|",
        ]
        lines += [f"| `{name}` | {where} |" for name, where in family_map(family)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
