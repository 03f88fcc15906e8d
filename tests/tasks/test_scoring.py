"""Reading answers: the authors' rules, and no guessing where an answer is unclear."""

import pytest

from mmlens.tasks import scoring
from mmlens.tasks.scoring_documents import docqa_score, mmlongbench_doc_score, open_match


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Yes", "yes"),
        ("yes, there is a dog", "yes"),
        ("No.", "no"),
        ("There is not a dog", "no"),
        ("Yes. No.", "yes"),  # POPE reads the first sentence only
        ("No, yes", "no"),  # and a no before a yes
        ("A dog", None),
        ("", None),
        ("Nobody knows", None),  # whole words
    ],
)
def test_yes_no_follows_popes_rule_and_leaves_the_rest_open(said, expected):
    assert scoring.yes_no(said) == expected


def test_last_yes_no_takes_the_last():
    assert scoring.last_yes_no("yes or no? No") == "no"
    assert scoring.last_yes_no("maybe") is None


CHOICES = ("red", "dark red", "Vitamin C", "none of them")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("B", "B"),
        ("b", None),
        ("(B)", "B"),
        ("B.", "B"),
        ("B) dark red", "B"),
        ("The answer is C", "C"),
        ("Answer: (A)", "A"),
        ("**A**", "A"),
        ("A or B", None),
        ("A or B.", None),
        ("A is right", "A"),
        ("Therefore B.", "B"),
        ("B\nbecause it is so", "B"),
        ("(A) and (B)", None),
        ("The answer is A. No, the answer is B.", None),
        ("red", "A"),
        ("It is dark red.", "B"),  # "red" stands in it too, in a longer choice
        ("Vitamin C", "C"),
        ("It must be vitamin c", "C"),
        ("C. Vitamin C", "C"),
        ("D. Vitamin C is not it", "D"),
        ("A dog is there", None),  # an article
        ("I think it is blue", None),
        ("red and Vitamin C", None),
        ("E", None),
        ("", None),
    ],
)
def test_choice_letter_takes_clear_answers_only(said, expected):
    assert scoring.choice_letter(said, CHOICES) == expected


def test_choice_letter_needs_no_texts():
    assert scoring.choice_letter("I pick B", {"A": "", "B": ""}) == "B"
    assert scoring.choice_letter("anything?", {"A": "", "B": ""}) is None
    assert scoring.choice_letter("A", ()) is None


def test_exact_and_contains_normalise_as_squad_does():
    assert scoring.exact("The  Red-Dog!", ["reddog"])
    assert not scoring.exact("red dogs", ["red dog"])
    assert scoring.contains("It is the Eiffel Tower, surely", ["eiffel tower"])
    assert not scoring.contains("anything", ["the"])  # an answer of articles only is in everything
    assert scoring.f1("red dog", "red cat") == 0.5
    assert scoring.f1("a", "b") == 0.0


def test_answer_part_is_what_follows_the_word():
    assert scoring.answer_part("So.\nAnswer: six") == "six"
    assert scoring.answer_part("Answer: Answer: six") == "six"
    assert scoring.answer_part("six") == "six"


def test_anls_is_zero_up_to_its_threshold():
    assert scoring.anls("green", ["green"]) == 1.0
    assert scoring.anls("greem", ["green", "x"]) == pytest.approx(0.8)
    assert scoring.anls("ab", ["ax"]) == 0.0  # exactly the threshold
    assert scoring.anls("ab", ["ax"], threshold=0.4) == 0.5
    assert scoring.anls("", [""]) == 1.0


def test_relaxed_numbers_are_within_five_percent():
    assert scoring.relaxed("104", "100") and not scoring.relaxed("106", "100")
    assert scoring.relaxed("25%", "0.25") and scoring.relaxed("1,000", "1000")
    assert not scoring.relaxed("0.01", "0") and scoring.relaxed("0", "0")
    assert scoring.relaxed("The red", "red") and not scoring.relaxed("red", "12")


def test_a_box_is_the_first_four_numbers():
    assert scoring.box_from_text("<box>[10, 20, 30.5, 40]</box> 5") == (10, 20, 30.5, 40)
    assert scoring.box_from_text("10 20 30") is None
    assert scoring.box_from_text("30, 20, 10, 40") is None  # no area


def test_iou_of_known_boxes():
    assert scoring.iou((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(1 / 3)
    assert scoring.iou((0, 0, 1, 1), (2, 2, 3, 3)) == 0.0
    assert scoring.iou((0, 0, 2, 2), (0, 0, 2, 2)) == 1.0


@pytest.mark.parametrize(
    ("said", "answer", "form", "expected"),
    [
        ("6", "6", "Int", 1.0),
        ("6.0", "6", "Int", 1.0),
        ("six", "6", "Int", 0.0),
        ("inf", "6", "Int", 0.0),
        ("6", "9,259", "Int", 0.0),
        ("12.4%", "12.45", "Float", 1.0),  # within 1 %
        ("0.124", "12.4%", "Float", 1.0),  # or a hundredth of it
        ("13", "12.4", "Float", 0.0),
        ("many", "12.4", "Float", 0.0),
        ("Greem", "green", "Str", 0.8),
        ("$green (dark)", "green", "Str", 1.0),
        ("page 13", "page 12", "Str", 0.0),  # pages, addresses and dates are exact
        ("2020-11", "2020-12", "Str", 0.0),
        ("a@b.org", "a@b.com", "Str", 0.0),
        ("Not answerable", "Not answerable", "None", 1.0),
        ("['b', 'a']", "['a', 'b']", "List", 1.0),
        ("['a']", "['a', 'b']", "List", 0.0),
        ("['2', '1']", "['1', '2']", "List", 1.0),
        ("['1', '3']", "['1', '2']", "List", 0.0),
        ("['green', 'yellaw']", "['green', 'yellow']", "List", pytest.approx(5 / 6)),
        ("[broken", "['a']", "List", 0.0),
    ],
)
def test_mmlongbench_doc_scores_by_format(said, answer, form, expected):
    assert mmlongbench_doc_score(said, answer, form) == expected


@pytest.mark.parametrize(
    ("said", "answer", "form", "expected"),
    [
        ("There are 6 of them", "6", "Integer", 1.0),
        ("16", "6", "Int", 0.0),
        ("about 12.5%", "0.125", "Float", 1.0),
        ("the green map", "green map", "String", 1.0),
        ("see page 3", "page 3", "Str", 1.0),
        ("green", "blue map", "String", 0.0),
        ("red and 3", '["blue map", "3"]', "List", 0.5),  # the words are not there, the number is
        ("red map, 3", '["red", "map", "3"]', "List", 0.9),  # words together: 2 of 3 said and 2 of 2 asked
    ],
)
def test_mmlongbench_scores_by_format(said, answer, form, expected):
    assert docqa_score(said, answer, form) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("said", "answers", "right"),
    [
        ("So the answer is 6.50", ["6.5"], True),
        ("It could be 7", ["6.5"], False),
        ("x = 3, so y is a beta sheet.", ["beta sheet"], True),
        ("the cat", ["C"], False),  # one letter must stand alone
        ("1,200", ["1200"], True),
    ],
)
def test_mmmu_open_answers(said, answers, right):
    assert open_match(said, answers) is right
