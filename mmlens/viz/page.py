"""The page of `mmlens demo`: one model's CoRe heads, from a question about a picture to the cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from mmlens.studies.core_heads import CoReResult, HeadLook, Story
from mmlens.viz.figures import COLORS, NAMES, dose_curve, head_map
from mmlens.viz.html import document, escape, write
from mmlens.viz.picture import attention_picture, evidence_picture

MODE_TITLES = {
    "visual_mask": "visual_mask: the heads cannot look at the picture",
    "output_zero": "output_zero: the heads add nothing at all",
}


def write_page(result: CoReResult, story: Story, path: str | Path, *, command: str) -> Path:
    """Write the page.

    Parameters
    ----------
    result, story
        The measurement, and one example in full.
    command
        What repeats it.
    """
    return write(path, page(result, story, command=command))


def page(result: CoReResult, story: Story, *, command: str) -> str:
    """The page's HTML. Every text that comes from data is escaped."""
    patterns = {
        "pattern": {
            "tokens": story.pattern_tokens,
            "attention": story.pattern,
            "showAxisLabels": True,
            "maskUpperTri": True,
        }
    }
    charts = {"heads": head_map(result.ram, mark=result.top).data()}
    for mode in ("visual_mask", "output_zero"):
        single = {"top_question": (len(result.top), [result.headline[mode]["top_question"]])}
        curves = {k: v for k, v in result.curves[mode].items() if k != "top_question"}
        chance = result.provenance["chance"]
        charts[mode] = dose_curve(curves, title=MODE_TITLES[mode], chance=chance, alone=single, legend=False).data()
    body = "\n".join(
        [
            _head(result, story),
            "<main>",
            _question(story),
            _scores(result),
            _looks(story),
            _cuts(result),
            _pattern(result, story),
            _repeat(result, command),
            "</main>",
            "<footer>Made by mmlens. One file, nothing loaded from elsewhere. Figures on this page were measured on a "
            "small model trained for this purpose; they say nothing about any paper's models.</footer>",
        ]
    )
    model = result.provenance["model"]["name"]
    return document(
        f"Which heads read the picture? {model}",
        body,
        libraries=("plotly", "circuitsvis"),
        charts=charts,
        patterns=patterns,
    )


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _head(result: CoReResult, story: Story) -> str:
    masked, zeroed = result.headline["visual_mask"], result.headline["output_zero"]
    facts = [
        ("", _percent(result.accuracy), "of questions answered right by the whole model"),
        ("hot", _percent(masked["top"]), f"with its top {len(result.top)} heads blind to the picture"),
        (
            "",
            _percent(mean(masked["layer_matched"])),
            f"with {len(result.top)} other heads of the same layers blind instead",
        ),
        ("hot", _percent(zeroed["top"]), f"with the top {len(result.top)} heads switched off"),
        ("", _percent(result.provenance["chance"]), "by guessing"),
    ]
    boxes = "".join(f'<div class="fact {c}"><b>{v}</b><span>{escape(t)}</span></div>' for c, v, t in facts)
    size = result.ram.values.size
    return f"""<header class="top">
<p class="eyebrow">mmlens &middot; CoRe heads &middot; {escape(result.provenance["model"]["name"])}</p>
<h1>{len(result.top)} of {size} heads read the picture</h1>
<p class="lead">A vision-language model is asked about coloured things in a picture. Every attention head is scored by how
much it looks at the right place while it reads the word that names the thing (retrieval attention mass, RAM). Then the best
heads are cut, and the answers are counted again on pictures that had no part in the ranking.</p>
<div class="facts">{boxes}</div>
</header>"""


def _question(story: Story) -> str:
    tokens = "".join(f'<span class="tok {escape(role)}">{escape(text)}</span>' for text, role in story.tokens)
    most = max((p for _, p in story.chances), default=1)
    bars = "".join(
        f'<div class="{"best" if i == 0 else ""}"><span class="{"best" if i == 0 else ""}">{escape(name)}</span>'
        f'<i style="width:{100 * p / max(most, 1e-9):.1f}%{";background:#0b6e8f" if i == 0 else ""}"></i>'
        f"<span>{p:.3f}</span></div>"
        for i, (name, p) in enumerate(story.chances[:5])
    )
    right = story.said == story.answer
    verdict = f'<b class="{"ok" if right else "bad"}">{escape(story.said) or "(nothing)"}</b>'
    return f"""<section id="question">
<h2>A question about a picture</h2>
<div class="split">
<figure>{evidence_picture(story.image, story.cells, story.coverage, story.boxes)}
<figcaption>What the model sees: {len(story.cells)} picture tokens (thin grid). The box is the evidence; the
{len(story.coverage)} tokens under it are where the answer can be read.</figcaption></figure>
<div>
<h3>{escape(story.question)}</h3>
<p>The model says {verdict}; the answer is <b>{escape(story.answer)}</b>.</p>
<div class="bars">{bars}</div>
<h3 style="margin-top:1.4rem">The prompt, token by token</h3>
<div class="tokens">{tokens}</div>
<p class="note">Blue is the question, dark blue the word that names the asked thing. RAM averages, over that word's
rows, the attention that lands on the evidence tokens.</p>
</div></div></section>"""


def _scores(result: CoReResult) -> str:
    table = result.ram.to_pandas().sort_values("rank").head(8)
    rows = "".join(
        f'<tr class="{"mark" if r["rank"] <= len(result.top) else ""}"><td class="num">{int(r["rank"])}</td>'
        f'<td>L{int(r["layer"])} H{int(r["head"])}</td><td class="num">{r["score"]:.3f}</td>'
        f'<td class="num">{r["low"]:.3f} to {r["high"]:.3f}</td></tr>'
        for _, r in table.iterrows()
    )
    return f"""<section id="scores">
<h2>Every head, scored</h2>
<p>RAM over the naming word, on {result.ram.n_valid} pictures of the ranking half. Outlined: the top
{len(result.top)} ({_percent(result.protocol.fraction)} of all heads). Hover a cell for its interval.</p>
<div class="split wide"><div class="chart" id="heads"></div>
<div class="scroll"><table><thead><tr><th class="num">rank</th><th>head</th><th class="num">RAM</th>
<th class="num">95 % interval</th></tr></thead><tbody>{rows}</tbody></table></div></div></section>"""


def _gallery(story: Story, looks: Sequence[HeadLook], peak: float, kind: str) -> str:
    return "".join(
        f"<figure>{attention_picture(story.image, story.cells, x.weights, peak=peak, label=f'{kind} head L{x.layer} H{x.head}')}"
        f"<figcaption>L{x.layer} H{x.head} &middot; RAM {x.ram:.3f}</figcaption></figure>"
        for x in looks
    )


def _looks(story: Story) -> str:
    peak = max((w for x in (*story.top, *story.bottom) for w in x.weights), default=1.0)
    return f"""<section id="looks">
<h2>Where they look</h2>
<p>Attention over the picture from the naming word of &ldquo;{escape(story.question)}&rdquo;. All ten pictures share one
scale: full yellow is a weight of {peak:.2f} on one token.</p>
<h3>Top heads by RAM</h3><div class="gallery">{_gallery(story, story.top, peak, "top")}</div>
<h3>Bottom heads by RAM</h3><div class="gallery">{_gallery(story, story.bottom, peak, "bottom")}</div></section>"""


def _cuts(result: CoReResult) -> str:
    k = len(result.top)
    rows = ""
    for kind in ("top", "layer_matched", "random", "bottom", "top_question"):
        cells = ""
        for mode in ("visual_mask", "output_zero"):
            values = result.headline[mode][kind]
            values = values if isinstance(values, list) else [values]
            cells += f'<td class="num">{_percent(mean(values))}</td><td>{", ".join(f"{v:.3f}" for v in values)}</td>'
        rows += f'<tr class="{"mark" if kind == "top" else ""}"><td>{NAMES[kind]}</td>{cells}</tr>'
    borrowed = sorted({(a, n) for b in result.provenance["borrowed"] for a, n in b.items()})
    spill = "".join(f" Layer {a} had too few others: {n} came from its neighbours." for a, n in borrowed)
    whole = {m: result.headline[m]["top_question"] for m in ("visual_mask", "output_zero")}
    overlap = len(result.top & result.top_question)
    best, best_question = float(result.ram.values[result.top.heads[0]]), float(result.ram_question.values.max())
    cost = result.accuracy - whole["visual_mask"]
    if cost >= 0.3:
        verdict = "Here enough of the retrieval stands out all the same"
    else:
        verdict = "Here that hides the heads that matter"
    zero_draws = result.headline["output_zero"]["layer_matched"]
    spoiled = sum(result.accuracy - a >= 0.3 for a in zero_draws)
    seen = (
        f"{spoiled} of these {len(zero_draws)} draws did (least {min(zero_draws):.3f}, median {median(zero_draws):.3f})"
        if spoiled
        else f"none of these {len(zero_draws)} draws did (least {min(zero_draws):.3f})"
    )
    legend = "".join(
        f'<span><i style="background:{COLORS[kind]}"></i>{escape(name)}</span>' for kind, name in NAMES.items()
    )
    return f"""<section id="cuts">
<h2>Cut them</h2>
<p>The top {k} heads against matched controls, judged on {result.protocol.n_judge} pictures of the other half (other doses on
{result.protocol.n_dose}). Every draw of a control is a dot.</p>
<div class="legend">{legend}</div>
<div class="charts">
<div><h3>{escape(MODE_TITLES["visual_mask"])}</h3><div class="chart" id="visual_mask"></div></div>
<div><h3>{escape(MODE_TITLES["output_zero"])}</h3><div class="chart" id="output_zero"></div></div></div>
<div class="scroll"><table><thead><tr><th>{k} heads cut</th><th class="num">visual_mask</th><th>each draw</th>
<th class="num">output_zero</th><th>each draw</th></tr></thead><tbody>
<tr><td>none</td><td class="num">{_percent(result.accuracy)}</td><td></td><td class="num">{_percent(result.accuracy)}</td><td></td></tr>
{rows}</tbody></table></div>
<p class="note"><b>Two ways to cut.</b> visual_mask hides the picture from a head and leaves its other work alone, so it
tests retrieval. output_zero removes everything the head does: a layer-matched draw may hit a head that is vital for
other work; {seen}.{spill}</p>
<p class="note"><b>Which words ask.</b> Over the whole question the best head's RAM is {best_question:.3f} instead of
{best:.3f}: most words of a question attend diffusely, and their rows dilute the one that retrieves. That ranking shares
{overlap} of {k} heads with the naming word's; cutting its top leaves {_percent(whole["visual_mask"])} under visual_mask and
{_percent(whole["output_zero"])} under output_zero. {verdict}.</p></section>"""


def _pattern(result: CoReResult, story: Story) -> str:
    layer, head = result.top.heads[0]
    pooled = story.pool[0] * story.pool[1]
    return f"""<section id="circuit">
<h2>The best head, row by row</h2>
<p>Layer {layer}, head {head}: each row is a token that looks, each column a token looked at. Picture tokens are pooled
{pooled} to one, labelled [row,column]: weights summed over what is looked at, averaged over what looks. Hover for
values.</p>
<div class="pattern"><div id="pattern"></div></div></section>"""


def _repeat(result: CoReResult, command: str) -> str:
    p = result.provenance
    versions = " &middot; ".join(f"{escape(k)} {escape(v)}" for k, v in p["versions"].items())
    checks = result.results()["checks"]
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td class='num'>{'controls cost nothing' if c['value'] is None else format(c['value'], '.3f')}</td>"
        f"<td class='num'>{c['threshold']}</td>"
        f"<td class='{'ok' if c['held'] else 'bad'}'>{'held' if c['held'] else 'not held'}</td></tr>"
        for name, c in checks.items()
    )
    return f"""<section id="repeat">
<h2>What was run</h2>
<pre>{escape(command)}</pre>
<p>Model {escape(p["model"]["name"])} (fingerprint {escape(p["model"]["fingerprint"])}, {escape(p["model"]["dtype"])});
task {escape(p["task"]["name"])}, {escape(p["task"].get("n_objects", ""))} objects a picture; seed
{result.protocol.seed}; {result.protocol.n_rank} pictures rank, {result.protocol.n_judge} others judge.
{versions}.</p>
<p>Seeds, k and thresholds were fixed before the first evaluation:</p>
<div class="scroll"><table><thead><tr><th>check</th><th class="num">figure</th><th class="num">threshold</th><th></th></tr></thead>
<tbody>{rows}</tbody></table></div></section>"""
