"""The command line: help without heavy imports, JSON everywhere, errors as messages."""

import json
import os
import subprocess
import sys

import pytest

from mmlens import cli


def _run(monkeypatch, capsys, *argv):
    monkeypatch.setattr(sys, "argv", ["mmlens", *argv])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out = capsys.readouterr()
    return stop.value.code, out.out, out.err


@pytest.mark.parametrize(
    "argv", [["--help"], ["demo", "--help"], ["scan", "--help"], ["ablate", "--help"], ["hooks", "--help"]]
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
    ],
)
def test_mistakes_become_messages_and_exit_code_two(monkeypatch, capsys, argv, error):
    code, out, err = _run(monkeypatch, capsys, *argv, "--json")
    assert code == 2 and json.loads(out)["error"] == error and "Traceback" not in err
    code, out, err = _run(monkeypatch, capsys, *argv)
    assert code == 2 and error in err and "Do:" in err and f"docs/errors/{error}.md" in err and "Traceback" not in err


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
