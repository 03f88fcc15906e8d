"""The page: whole, offline, small, and inert whatever the data says."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from mmlens import HeadScores
from mmlens.studies.core_heads import CoReResult, HeadLook, Protocol, Story
from mmlens.viz.html import POLICY, escape, script_json
from mmlens.viz.page import page

ATTACK = "</script><script>alert(1)</script>"


def result() -> CoReResult:
    samples = np.random.default_rng(0).random((20, 8, 12)).astype(np.float32)
    ram = HeadScores(samples, {"metric": "ram", "query": "subject", "seed": 0})
    top, bottom = ram.top(k=5), ram.bottom(k=5)
    headline = {
        mode: {
            "top": 0.2,
            "layer_matched": [0.9, 0.95, 0.94, 0.9, 0.1],
            "random": [0.9] * 5,
            "bottom": 0.96,
            "top_question": 0.9,
        }
        for mode in ("output_zero", "visual_mask")
    }
    curves = {
        mode: {
            kind: [(0, [0.97]), (5, [0.5, 0.6])]
            for kind in ("top", "layer_matched", "random", "bottom", "top_question")
        }
        for mode in headline
    }
    provenance = {
        "model": {"name": "toy", "fingerprint": "abc", "dtype": "float32"},
        "task": {"name": "scenes/image", "n_objects": 6},
        "chance": 0.125,
        "versions": {"mmlens": "0"},
        "borrowed": [{"0": 1}],
    }
    return CoReResult(ram, ram, top, bottom, top, 0.97, 0, headline, curves, Protocol(), provenance)


def story(text: str = "star") -> Story:
    look = lambda head: HeadLook(*head, 0.5, tuple([0.1] * 16))
    return Story(
        question=f"What color is the {text}?",
        answer=text,
        said=text,
        image=Image.new("RGB", (64, 64), "navy"),
        boxes=((0.0, 0.0, 16.0, 16.0),),
        tokens=((text, "subject"), ("16 picture tokens", "image")),
        cells=tuple((16.0 * c, 16.0 * r, 16.0 * c + 16, 16.0 * r + 16) for r in range(4) for c in range(4)),
        coverage={0: 1.0},
        chances=((text, 0.9), ("blue", 0.1)),
        top=tuple(look((0, h)) for h in range(5)),
        bottom=tuple(look((1, h)) for h in range(5)),
        pattern=[[1.0, 0.0], [0.5, 0.5]],
        pattern_tokens=[text, "b"],
        pool=(2, 2),
    )


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen, self.scripts, self.text = [], 0, []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        self.scripts += tag == "script"

    def handle_data(self, data):
        self.text.append(data)


def _parse(text):
    tags = Tags()
    tags.feed(text)
    return tags


def test_text_from_data_adds_no_script_and_stays_readable():
    plain, attacked = (
        _parse(page(result(), story(), command="x")),
        _parse(page(result(), story(ATTACK), command=ATTACK)),
    )
    assert plain.scripts == attacked.scripts
    assert [t for t, _ in plain.seen] == [t for t, _ in attacked.seen]
    assert any(ATTACK in t for t in attacked.text)


def test_the_model_and_task_names_are_escaped_too():
    bad = replace(
        result(), provenance={**result().provenance, "model": {"name": ATTACK, "fingerprint": ATTACK, "dtype": ATTACK}}
    )
    assert _parse(page(bad, story(), command="x")).scripts == _parse(page(result(), story(), command="x")).scripts


def test_nothing_is_loaded_from_elsewhere():
    text = page(result(), story(), command="x")
    tags = _parse(text)
    for tag, attrs in tags.seen:
        for name in ("src", "href", "srcset", "action", "data"):
            value = attrs.get(name) or ""
            assert not value or value.startswith(("data:", "#")), (tag, value[:80])
    assert {"http-equiv": "Content-Security-Policy", "content": POLICY} in [a for t, a in tags.seen if t == "meta"]
    assert "default-src 'none'" in POLICY and not re.search(r"https?:", POLICY)
    style = "".join(re.findall(r"<style>(.*?)</style>", text, re.S))
    assert "url(" not in style and "@import" not in style


def test_the_page_is_one_file_under_four_megabytes():
    assert len(page(result(), story(), command="x").encode()) < 4 * 2**20


def test_every_picture_has_words_for_those_who_cannot_see_it():
    tags = _parse(page(result(), story(), command="x"))
    pictures = [a for t, a in tags.seen if t == "svg"]
    assert len(pictures) == 11 and all(a.get("aria-label") for a in pictures)


def test_failed_checks_are_shown_as_they_are():
    bad = replace(result(), accuracy=0.5)
    text = page(bad, story(), command="x")
    assert "not held" in text and bad.results()["checks"]["accuracy"]["held"] is False


def test_json_for_scripts_cannot_end_the_script():
    data = {"a": ATTACK + "\u2028<!--", "b": [1.5, None]}
    text = script_json(data)
    assert not set("<>&\u2028") & set(text) and json.loads(text) == data
    with pytest.raises(ValueError, match="JSON"):
        script_json({"a": float("nan")})
    assert escape('<a b="c">&') == "&lt;a b=&quot;c&quot;&gt;&amp;"


def test_a_head_map_saves_as_one_file(tmp_path):
    path = result().ram.plot().save(tmp_path / "deep" / "heads.html")
    text = path.read_text()
    assert "lib-plotly" in text and "lib-circuitsvis" not in text and len(text) < 3 * 2**20


def test_nan_heads_leave_holes_not_zeros():
    samples = np.full((3, 2, 2), 0.5, np.float32)
    samples[:, 1, 1] = np.nan
    figure = HeadScores(samples, {"metric": "ram"}).plot().data()
    z = figure["data"][0]["z"]
    assert z[1][1] is None and z[0][0] == 0.5
