"""Docs show only what runs: every Python snippet, every docstring example, one page for every error."""

import doctest
import importlib
import inspect
import pickle
import pkgutil
import re
from pathlib import Path

import pytest

import mmlens
from mmlens import errors

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _snippets(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)


@pytest.mark.parametrize("page", [p for p in PAGES if _snippets(p)], ids=lambda p: p.stem)
def test_snippets_run_in_the_order_of_the_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "snippet"}
    for i, code in enumerate(_snippets(page)):
        path = tmp_path / f"snippet_{i}.py"  # a file, as trace blocks need one
        path.write_text(code)
        exec(compile(code, str(path), "exec"), scope)


MODULES = [m.name for m in pkgutil.walk_packages(mmlens.__path__, "mmlens.")]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


def test_every_error_has_a_page_and_every_page_an_error():
    named = {n for n, e in vars(errors).items() if inspect.isclass(e) and issubclass(e, errors.MMLensError)}
    pages = {p.stem for p in (ROOT / "docs/errors").glob("*.md")} - {"index"}
    assert named == pages
    index = (ROOT / "docs/errors/index.md").read_text()
    assert all(f"]({n}.md)" in index for n in named)


def test_errors_say_what_was_given_expected_and_to_do():
    error = errors.OptionError("mode='x'", expected="a or b", fix="use a")
    assert (error.given, error.expected, error.fix) == ("mode='x'", "a or b", "use a")
    assert str(error).splitlines() == [
        "mode='x'",
        "  Expected: a or b",
        "  Do: use a",
        "  More: docs/errors/OptionError.md",
    ]


def test_errors_travel_between_processes():
    error = pickle.loads(pickle.dumps(errors.RegionError("a", expected="b", fix="c")))
    assert type(error) is errors.RegionError and (error.given, error.expected, error.fix) == ("a", "b", "c")


def test_every_raised_error_is_documented_in_the_code_that_raises_it():
    """No bare exception types for users' mistakes."""
    allowed = {"Fault", "IndexError", "KeyError", "AttributeError", "SystemExit"}
    for path in (ROOT / "mmlens").rglob("*.py"):
        for raised in re.findall(r"^\s+raise ([A-Za-z]\w+)\(", path.read_text(), re.M):
            assert raised in vars(errors) or raised in allowed, f"{path.name}: {raised}"


def test_the_hooks_page_is_made_of_the_code():
    from mmlens.families.hookmap import page

    assert (ROOT / "docs/hooks.md").read_text() == page(), "python -m mmlens.families.hookmap > docs/hooks.md"


def test_the_hooks_page_tells_the_truth():
    """Every name and place on it exists in a tiny model of the family."""
    import tiny

    from mmlens.families import FAMILIES
    from mmlens.families.hookmap import family_map

    for family in FAMILIES:
        model, processor = tiny.FAMILIES[family.name]()
        modules = {name for name, _ in model.named_modules()}
        with mmlens.HookedVLM.from_model(model, processor) as vlm:
            names = set(vlm.hook_names())
        for name, where in family_map(family):
            first = name.split(",")[0].format(L=1, i=0)  # block 1 of the expert model is a dense one
            assert first in names, (family.name, name)
            path = re.match(r"(?:in|out)put of ([\w.{}]+)", where)
            assert path is None or path[1].format(L=1, i=0) in modules, (family.name, where)


def test_the_drawn_layouts_are_made_of_the_code(tmp_path):
    from mmlens.viz.layouts import draw_published

    for path in draw_published(tmp_path):
        assert (ROOT / "docs/img" / path.name).read_text() == path.read_text(), "python -m mmlens.viz.layouts docs/img"
