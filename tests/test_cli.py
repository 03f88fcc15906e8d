"""The command line: help without heavy imports, JSON everywhere, errors as messages."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from mmlens import cli


def _run(monkeypatch, capsys, *argv):
    monkeypatch.setattr(sys, "argv", ["mmlens", *argv])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out = capsys.readouterr()
    return stop.value.code, out.out, out.err


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["demo", "--help"],
        ["scan", "--help"],
        ["ablate", "--help"],
        ["hooks", "--help"],
        ["locate", "--help"],
        ["tasks", "--help"],
    ],
)
def test_help_imports_nothing_heavy(argv):
    code = (
        "import sys, mmlens, mmlens.cli\n"
        f"sys.argv = ['mmlens', *{argv!r}]\n"
        "try: mmlens.cli.main()\n"
        "except SystemExit as stop: assert stop.code in (0, None), stop.code\n"
        "heavy = {'torch', 'transformers', 'nnsight', 'numpy', 'pandas', 'plotly', 'transformer_lens'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_importing_mmlens_imports_nothing_heavy():
    code = (
        "import sys, mmlens; assert not {'torch', 'transformers', 'nnsight', 'numpy'} & set(sys.modules); dir(mmlens)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_can_be_imported():
    import mmlens

    for name in mmlens.__all__:
        assert getattr(mmlens, name) is not None
    with pytest.raises(AttributeError, match="HookedVML"):
        mmlens.HookedVML  # noqa: B018


def test_models(monkeypatch, capsys):
    code, out, _ = _run(monkeypatch, capsys, "models", "--json")
    found = json.loads(out)
    assert code in (0, None) and found["embedded"] == ["toy-qwen3-vl"]
    assert {"qwen3-vl", "llava-1.5", "gemma3"} <= set(found["families"]) and "scenes/digits" in found["tasks"]
    assert "toy-qwen3-vl" in _run(monkeypatch, capsys, "models")[1]


def test_hooks(monkeypatch, capsys):
    _, out, _ = _run(monkeypatch, capsys, "hooks", "toy-qwen3-vl", "--match", "blocks.0.attn.*", "--json")
    found = json.loads(out)
    assert [f["name"].rsplit("_", 1)[-1] for f in found] == [
        "q",
        "k",
        "v",
        "q",
        "k",
        "scores",
        "pattern",
        "z",
        "result",
    ]
    assert [f["writable"] for f in found] == [True] * 8 + [False]
    _, out, _ = _run(monkeypatch, capsys, "hooks", "toy-qwen3-vl", "--match", "vision.z")
    assert "3 hooks" in out and "vision.blocks.2.attn.hook_z" in out


def test_scan_then_ablate(monkeypatch, capsys, tmp_path):
    run = str(tmp_path / "run")
    argv = ["toy-qwen3-vl", "scenes/image", "--query", "subject", "--n", "10", "--out", run]
    _, out, _ = _run(monkeypatch, capsys, "scan", *argv, "--top", "3", "--plot", str(tmp_path / "map.html"), "--json")
    found = json.loads(out)
    assert [r["rank"] for r in found["top"]] == [1, 2, 3] and found["n_valid"] == 10
    assert (tmp_path / "map.html").stat().st_size > 100_000
    options = ["--scores", run, "--k", "5", "--mode", "visual_mask", "--draws", "1", "--n", "20", "--json"]
    _, out, _ = _run(monkeypatch, capsys, "ablate", "toy-qwen3-vl", "scenes/image", *options)
    cut = json.loads(out)
    assert len(cut["heads"]) == 5 and cut["heads"][:3] == [[r["layer"], r["head"]] for r in found["top"]]
    assert cut["cut"] < cut["accuracy"] and len(cut["random"]) == 1
    _, out, _ = _run(monkeypatch, capsys, "ablate", "toy-qwen3-vl", "--heads", "0.0,3.5", "--draws", "0", "--n", "4")
    assert "these" in out


def test_scan_of_several_metrics(monkeypatch, capsys, tmp_path):
    argv = ["scan", "toy-qwen3-vl", "--metric", "ram,pointing", "--query", "subject", "--n", "4", "--top", "2"]
    found = json.loads(_run(monkeypatch, capsys, *argv, "--plot", str(tmp_path / "map.html"), "--json")[1])
    assert list(found) == ["pointing", "ram"] and all(len(of["top"]) == 2 for of in found.values())
    assert (tmp_path / "map-ram.html").exists() and (tmp_path / "map-pointing.html").exists()
    out = _run(monkeypatch, capsys, *argv)[1]
    assert "ram over scenes/image" in out and "pointing over scenes/image" in out


def test_compare(monkeypatch, capsys, tmp_path):
    for name, query in (("a", "subject"), ("b", "question")):
        argv = ["scan", "toy-qwen3-vl", "--query", query, "--n", "4", "--out", str(tmp_path / name), "--json"]
        _run(monkeypatch, capsys, *argv)
    argv = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--k", "8"]
    found = json.loads(_run(monkeypatch, capsys, *argv, "--json")[1])
    (pair,) = found["pairs"]
    assert -1 <= pair["spearman"] <= 1 and 0 <= pair["overlap"] <= 1
    assert len(found["universal"]) == round(8 * pair["overlap"]) and found["universal_chance"] == pytest.approx(64 / 96)
    out = _run(monkeypatch, capsys, *argv)[1]
    assert "top-8 overlap" in out and "expected by chance" in out
    same = json.loads(_run(monkeypatch, capsys, "compare", *[str(tmp_path / "a")] * 2, "--json")[1])
    assert same["pairs"][0]["spearman"] == pytest.approx(1) and same["pairs"][0]["overlap"] == 1


def test_layers(monkeypatch, capsys, tmp_path):
    argv = ["layers", "toy-qwen3-vl", "--metric", "rid,mixig", "--tokens", "image", "--n", "2", "--alpha", "8"]
    more = ["--out", str(tmp_path / "run"), "--plot", str(tmp_path / "layers.html"), "--json"]
    found = json.loads(_run(monkeypatch, capsys, *argv, *more)[1])
    assert found["modules"] == ["attn", "mlp"] and np.array(found["mean"]["rid"]).shape == (2, 8)
    assert found["provenance"]["alpha"] == 8 and (tmp_path / "layers-mixig.html").exists()
    assert (tmp_path / "run/profile.json").exists()
    out = _run(monkeypatch, capsys, *argv)[1]
    assert "rid over image tokens" in out and "attn" in out


def test_demo_writes_the_page_and_the_results(monkeypatch, capsys, tmp_path):
    from mmlens.studies import core_heads

    real = core_heads.Protocol
    sizes = dict(n_rank=10, n_judge=10, n_dose=10, draws=1, dose_draws=1, doses=(1,))
    monkeypatch.setattr(core_heads, "Protocol", lambda seed: real(seed=seed, **sizes))
    _, out, _ = _run(monkeypatch, capsys, "demo", "--out", str(tmp_path / "demo"), "--json")
    body = json.loads(out)
    assert body == json.loads((tmp_path / "demo/results.json").read_text()) and body["n"] == 10
    assert {"accuracy", "chance", "k", "n_heads", "n", "seed", "ram_top", "output_zero", "visual_mask"} <= set(body)
    assert (tmp_path / "demo/index.html").stat().st_size < 4 * 2**20
    code, out, _ = _run(monkeypatch, capsys, "demo", "--out", str(tmp_path / "demo"), "--seed", "1")
    assert "page:" in out and "layer_matched" in out


@pytest.fixture
def photo(tmp_path):
    from PIL import Image

    path = tmp_path / "photo.png"
    Image.new("RGB", (128, 96), (200, 30, 30)).save(path)
    return str(path)


def test_locate(monkeypatch, capsys, tmp_path, photo):
    drawing = tmp_path / "tokens.png"
    argv = ["locate", "toy-qwen3-vl", photo, "--box", "16,16,48,32"]
    _, out, _ = _run(monkeypatch, capsys, *argv, "--out", str(drawing), "--json")
    found = json.loads(out)
    assert found["image_tokens"] == 48 and found["size"] == [128, 96] and found["coverage"] == [1.0, 1.0]
    first = found["positions"][0]
    assert found["positions"] == [first, first + 1] and found["by_view"] == {"whole": found["positions"]}
    assert drawing.read_bytes().startswith(b"\x89PNG")
    code, out, _ = _run(monkeypatch, capsys, *argv)
    assert code in (0, None) and f"{first}-{first + 1}" in out and "2 of 48" in out
    two = ["--box", "0,0,16,16"]
    assert len(json.loads(_run(monkeypatch, capsys, *argv, *two, "--json")[1])["positions"]) == 3
    points = [
        "locate",
        "toy-qwen3-vl",
        photo,
        "--box",
        "102,132,306,264",
        "--units",
        "points",
        "--page-size",
        "816,792",
    ]
    assert json.loads(_run(monkeypatch, capsys, *points, "--json")[1])["positions"] == found["positions"]
    asked = json.loads(_run(monkeypatch, capsys, *argv, "--question", "what is the color ?", "--json")[1])
    assert asked["positions"] == found["positions"]
    half = [*argv[:-1], "16,16,40,32", "--coverage", "0.6", "--json"]
    assert json.loads(_run(monkeypatch, capsys, *half)[1])["positions"] == [first]


def test_locate_reads_no_weights(monkeypatch, capsys, photo):
    from transformers import PreTrainedModel

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *a, **k: pytest.fail("weights were read"))
    assert _run(monkeypatch, capsys, "locate", "toy-qwen3-vl", photo, "--box", "0,0,9,9")[0] in (0, None)


def test_locate_in_a_video(monkeypatch, capsys, tmp_path):
    av = pytest.importorskip("av")
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for i in range(16):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 10 * i, np.uint8), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    argv = ["locate", "toy-qwen3-vl", str(path), "--box", "0,0,16,16", "--fps", "2", "--json"]
    every = json.loads(_run(monkeypatch, capsys, *argv)[1])
    some = json.loads(_run(monkeypatch, capsys, *argv, "--seconds", "1,2")[1])
    assert set(every["by_view"]) == {"frame:0", "frame:2", "frame:4", "frame:6"}
    assert set(some["by_view"]) == {"frame:2", "frame:4"}
    none = json.loads(_run(monkeypatch, capsys, *argv, "--seconds", "1.6,1.9")[1])
    assert none["positions"] == [] and "between the frames" in none["reason"]


def test_tasks(monkeypatch, capsys):
    found = json.loads(_run(monkeypatch, capsys, "tasks", "--json")[1])
    assert {"scenes/video", "scenes/document:digits"} <= set(found["drawn here"])
    assert {"refcocog", "vidstg", "mmdocir", "pope", "jsonl"} <= set(found["data sets"])
    assert all(facts["layout"] and facts["subsets"] for facts in found["data sets"].values())
    assert "refcocog" in _run(monkeypatch, capsys, "tasks")[1]


def test_tasks_check_counts_faults_and_fails_on_nothing_usable(monkeypatch, capsys, tmp_path, photo):
    good = {
        "id": "a",
        "question": "what?",
        "answer": "red",
        "images": ["photo.png"],
        "evidence": [{"box": [0, 0, 9, 9]}],
    }
    bad = good | {"id": "b", "images": ["nowhere.png"]}
    (tmp_path / "examples.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(bad) + "\n{cut")
    code, out, _ = _run(monkeypatch, capsys, "tasks", "check", "jsonl", str(tmp_path), "--json")
    found = json.loads(out)
    assert code in (0, None) and found["n_usable"] == 1 and len(found["faults"]) == 2
    assert "missing" in found["faults"]["b"]
    (tmp_path / "examples.jsonl").write_text(json.dumps(bad) + "\n")
    code, out, _ = _run(monkeypatch, capsys, "tasks", "check", "jsonl", str(tmp_path))
    assert code == 1 and "0 usable" in out and "nowhere.png" in out


def test_options_of_a_task_reach_it(monkeypatch, capsys):
    argv = ["scan", "toy-qwen3-vl", "scenes/multi", "-o", "n_images=2", "-o", "needles=1", "--n", "2", "--json"]
    found = json.loads(_run(monkeypatch, capsys, *argv)[1])
    assert found["provenance"]["task"]["n_images"] == 2


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["scan", "toy-qwen3-lv"], "ModelNotFoundError"),
        (["scan", "toy-qwen3-vl", "scenes/imag"], "UnknownTaskError"),
        (["scan", "toy-qwen3-vl", "--metric", "mass"], "OptionError"),
        (["scan", "toy-qwen3-vl", "--query", "nonsense", "--n", "2"], "TokenGroupError"),
        (["hooks", "toy-qwen3-vl", "--match", "resid_pots"], "UnknownHookError"),
        (["ablate", "toy-qwen3-vl"], "OptionError"),
        (["ablate", "toy-qwen3-vl", "--heads", "0-1"], "HeadError"),
        (["ablate", "toy-qwen3-vl", "--heads", "0.99"], "HeadError"),
        (["ablate", "toy-qwen3-vl", "--heads", "0.0", "--k", "3"], "OptionError"),
        (["ablate", "toy-qwen3-vl", "--scores", "/nowhere"], "RunFolderError"),
        (["demo", "--model", "nobody/nothing"], "ModelNotFoundError"),
        (["compare", "/nowhere", "/nowhere"], "RunFolderError"),
        (["compare", "/nowhere"], "OptionError"),
        (["layers", "toy-qwen3-vl", "--metric", "rids", "--n", "2"], "OptionError"),
        (["scan", "toy-qwen3-vl", "--metric", "ram,mass", "--n", "2"], "OptionError"),
        (["locate", "toy-qwen3-vl", "/nowhere.png", "--box", "0,0,9,9"], "PictureError"),
        (["locate", "toy-qwen3-vl", "/nowhere.mp4", "--box", "0,0,9,9"], "VideoError"),
        (["locate", "toy-qwen3-vl", "/nowhere.png", "--box", "0,0,9"], "OptionError"),
        (["locate", "toy-qwen3-vl", "/nowhere.png", "--box", "9,0,9,9"], "RegionError"),
        (["locate", "toy-qwen3-vl", "/nowhere.png", "--box", "0,0,9,9", "--seconds", "1,2"], "OptionError"),
        (["tasks", "check", "pop", "/nowhere"], "UnknownTaskError"),
        (["tasks", "check", "pope", "/nowhere"], "DataError"),
        (["tasks", "check", "scenes/image", "/nowhere"], "UnknownTaskError"),
        (["tasks", "check", "pope"], "OptionError"),
        (["tasks", "chekc", "pope", "/nowhere"], "OptionError"),
        (["scan", "toy-qwen3-vl", "pope"], "OptionError"),
        (["scan", "toy-qwen3-vl", "-o", "n_objects"], "OptionError"),
    ],
)
def test_mistakes_become_messages_and_exit_code_two(monkeypatch, capsys, argv, error):
    code, out, err = _run(monkeypatch, capsys, *argv, "--json")
    assert code == 2 and json.loads(out)["error"] == error and "Traceback" not in err
    code, out, err = _run(monkeypatch, capsys, *argv)
    assert code == 2 and error in err and "Do:" in err and f"docs/errors/{error}.md" in err and "Traceback" not in err


def test_unknown_units_are_named(as_users, monkeypatch, capsys):
    argv = ["locate", "toy-qwen3-vl", "/nowhere.png", "--box", "0,0,9,9", "--units", "feet"]
    code, _, err = _run(monkeypatch, capsys, *argv)
    assert code == 2 and "thousandths" in err


def test_an_interrupted_command_says_how_to_go_on(monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupt)
    code, _, err = _run(monkeypatch, capsys, "scan", "toy-qwen3-vl")
    assert code == 130 and "goes on" in err


def test_the_command_is_installed():
    done = subprocess.run(
        [os.path.join(os.path.dirname(sys.executable), "mmlens"), "models", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0 and json.loads(done.stdout)["embedded"]


def test_verify_tells_every_check_and_exits_with_one_on_a_fault(monkeypatch, capsys):
    from mmlens.model import verify

    code, out, _ = _run(monkeypatch, capsys, "verify", "toy-qwen3-vl", "--json")
    told = json.loads(out)
    assert code in (0, None) and told["ok"] and len(told["checks"]) == len(verify._CHECKS)
    monkeypatch.setitem(verify._CHECKS, "finite", lambda vlm, prompt: (False, "planted"))
    code, out, _ = _run(monkeypatch, capsys, "verify", "toy-qwen3-vl")
    assert code == 1 and "FAIL" in out and "planted" in out


@pytest.mark.parametrize("text", ["path=3", "name=x"])
def test_an_option_that_says_the_task_again_is_a_message(monkeypatch, capsys, tmp_path, text):
    code, _, err = _run(monkeypatch, capsys, "tasks", "check", "jsonl", str(tmp_path), "-o", text)
    assert code == 2 and "OptionError" in err and f"--option {text}" in err


def test_names_in_a_table_are_no_markup(monkeypatch, capsys, tmp_path):
    row = {"id": "[/b]", "question": "q", "answer": "a", "images": ["[/b].png"]}
    (tmp_path / "examples.jsonl").write_text(json.dumps(row))
    code, out, _ = _run(monkeypatch, capsys, "tasks", "check", "jsonl", str(tmp_path))
    assert code == 1 and "[/b].png is missing" in out
