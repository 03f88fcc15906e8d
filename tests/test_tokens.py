"""The grammar of token groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmlens import PerExample, TokenSet
from mmlens.errors import TokenGroupError
from mmlens.tokens import parse_group, resolve_group

ROLES = {"all": tuple(range(10)), "image": (2, 3, 4, 5), "evidence": (3, 4), "question": (7, 8), "last": (9,)}


def _resolve(group, **more):
    return resolve_group(group, ROLES, **{"length": 12, "example": 0, **more})


@pytest.mark.parametrize(
    ("group", "want"),
    [
        ("image", (2, 3, 4, 5)),
        ("image-evidence", (2, 5)),
        (" question + last ", (7, 8, 9)),
        ("all-image-question", (0, 1, 6, 9)),
        ("image-evidence+evidence", (2, 3, 4, 5)),
        (3, (3,)),
        (-1, (11,)),
        ([5, 1, -12, 1], (0, 1, 5)),
        (TokenSet.of([4, 2]), (2, 4)),
        (PerExample(["last"]), (9,)),
        (range(3), (0, 1, 2)),
        ([], ()),
    ],
)
def test_groups(group, want):
    assert _resolve(group) == want


@pytest.mark.parametrize("group", ["", "image evidence", "image--evidence", "Image", "image+", "image:", "im*ge", "+"])
def test_text_that_does_not_parse(group):
    with pytest.raises(TokenGroupError, match=r"does not parse|no meaning"):
        _resolve(group)


def test_a_name_without_meaning_lists_those_that_have():
    with pytest.raises(TokenGroupError, match="all, evidence, image, last, question"):
        _resolve("frame:3")


@pytest.mark.parametrize(
    "group", [12, -13, [0, 40], None, 1.5, True, [True], ["last"], PerExample([PerExample(["last"])]), PerExample([])]
)
def test_things_that_are_no_group(group, as_users):
    with pytest.raises(TokenGroupError):
        _resolve(group)


@given(st.lists(st.sampled_from(sorted(ROLES)), min_size=1, max_size=5), st.data())
def test_text_means_union_and_difference_from_left_to_right(names, data):
    signs = ["+"] + [data.draw(st.sampled_from("+-")) for _ in names[1:]]
    want: set = set()
    for sign, name in zip(signs, names):
        want = want | set(ROLES[name]) if sign == "+" else want - set(ROLES[name])
    text = "".join(s + n for s, n in zip(signs, names)).lstrip("+")
    assert _resolve(text) == tuple(sorted(want))
    assert parse_group(text) == tuple(zip(signs, names))


sets = st.lists(st.integers(0, 30), max_size=8)


@given(sets, sets, sets)
def test_token_sets_are_sets(a, b, c):
    x, y, z = TokenSet.of(a), TokenSet.of(b), TokenSet.of(c)
    assert x | y == y | x and x & y == y & x and (x | y) - y == x - y
    assert (x | y) & z == (x & z) | (y & z) and x + y == x | y
    assert set((x - y).positions) == set(a) - set(b)


def test_token_sets_of_other_prompts_do_not_mix():
    with pytest.raises(TokenGroupError):
        TokenSet.of([1]) | TokenSet.of([1], [2])
    with pytest.raises(TokenGroupError, match="examples"):
        _ = TokenSet.of([1], [2]).positions
