"""Reading what a model said: yes or no, a letter, a box, a number; and how right it is. Never a random guess."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence

Corners = tuple[float, float, float, float]

_NUMBER = re.compile(r"-?(?:\d+(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and extra spaces (SQuAD's evaluation script)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact(said: str, answers: Sequence[str]) -> bool:
    """Whether an answer is one of the accepted ones, both normalised (SQuAD's exact match)."""
    return normalised(said) in {normalised(a) for a in answers}


def contains(said: str, answers: Sequence[str]) -> bool:
    """Whether an accepted answer stands in what was said, both normalised (MMLongBench's `sub_em`)."""
    return any(normalised(a) in normalised(said) for a in answers if normalised(a))


def f1(said: str, answer: str) -> float:
    """Harmonic mean of the shares of words found, both ways (SQuAD's F1)."""
    mine, gold = normalised(said).split(), normalised(answer).split()
    common = sum(min(mine.count(w), gold.count(w)) for w in set(gold))
    return 2 * common / (len(mine) + len(gold)) if common else 0.0


def answer_part(said: str, prefix: str = "answer:") -> str:
    """What follows "Answer:", where a model says it; else everything (MMLongBench's `parse_output`)."""
    found = re.search(rf"{re.escape(prefix)}(.*)", said, re.IGNORECASE | re.DOTALL)
    rest = found[1] if found else said
    return re.sub(rf"^\s*{re.escape(prefix)}", "", rest, flags=re.IGNORECASE).strip()


def yes_no(text: str) -> str | None:
    """'yes', 'no' or None, by POPE's rule (evaluate.py of AoiDragon/POPE): the first sentence decides, no before yes.

    POPE takes a sentence with none of these words for a yes; here it is None.
    """
    sentence = text.strip().split(".")[0].replace(",", " ")
    words = {w.strip(string.punctuation + " ").lower() for w in sentence.split()}
    if words & {"no", "not"}:
        return "no"
    return "yes" if "yes" in words else None


def last_yes_no(text: str) -> str | None:
    """The last yes or no in a text; None if there is none (MMLongBench's `extract_binary_label`)."""
    found = re.findall(r"\b(yes|no)\b", text, re.IGNORECASE)
    return found[-1].lower() if found else None


# ---------------------------------------------------------------------- choices
def choice_letter(text: str, choices: Sequence[str] | Mapping[str, str]) -> str | None:
    """The letter that an answer chooses, or None where it chooses none, or several.

    After MMMU's `parse_multi_choice_response`, without its random guess for unclear answers: "answer is X", then X with
    brackets, then at the start of a line before a point, then X alone, then the text of one choice.

    Parameters
    ----------
    choices
        Texts, lettered from A; or {letter: text}.
    """
    texts = dict(choices) if isinstance(choices, Mapping) else dict(zip(string.ascii_uppercase, choices))
    letters = "".join(texts)
    if not letters:
        return None
    whole = [k for k, v in texts.items() if normalised(v) and normalised(v) == normalised(text)]
    if len(whole) == 1:
        return whole[0]
    rest = text  # without the choices' own words: "B. Vitamin C" names one letter, not two
    for choice in sorted((v for v in texts.values() if len(v) > 1), key=len, reverse=True):
        rest = re.sub(rf"(?<!\w){re.escape(choice)}(?!\w)", " ", rest, flags=re.IGNORECASE)
    named = re.findall(rf"(?i:answer|option|choice)(?:\s+is)?\s*:?\s*[(\[*]*([{letters}])(?![\w'’])", rest)
    bracketed = re.findall(rf"(?<![\w'’])([{letters}])\)", rest)
    leading = re.findall(rf"^[\s*\"'(]*([{letters}])(?:[.:]|\W*$)", rest, re.MULTILINE)
    found = set(named) or set(bracketed) or set(leading)
    if found:
        return found.pop() if len(found) == 1 else None
    # "A" and "I" before a word in lower case are an article and a pronoun
    standing = re.findall(rf"(?<![\w'’])([{letters}])(?![\w'’])(\s+(?!(?:n?or|and|is|because|since)\b)[a-z])?", rest)
    alone = {k for k, word in standing if not (word and k in "AI")}
    told = {k for k, v in texts.items() if re.search(rf"(?<!\w){re.escape(v.lower())}(?!\w)", text.lower()) and v}
    longest = {k for k in told if not any(texts[k].lower() in texts[o].lower() for o in told - {k})}
    found = alone | longest
    return found.pop() if len(found) == 1 else None


def lettered(choices: Sequence[str]) -> str:
    """Choices as lines "A. ...", "B. ..."."""
    return "\n".join(f"{letter}. {choice}" for letter, choice in zip(string.ascii_uppercase, choices))


# ---------------------------------------------------------------------- numbers
def numbers(text: str) -> list[float]:
    """The numbers in a text; 1,234 is one number."""
    return [float(n.replace(",", "")) for n in _NUMBER.findall(text)]


def relaxed(said: str, answer: str, *, tolerance: float = 0.05) -> bool:
    """ChartQA's relaxed accuracy: numbers within `tolerance` of the gold one, other answers exact.

    "25%" is 0.25; a gold answer of 0 must be met exactly.
    """
    mine, gold = _plain_number(said), _plain_number(answer)
    if gold is None:
        return exact(said, [answer])
    return mine is not None and (abs(mine - gold) <= tolerance * abs(gold))


def _plain_number(text: str) -> float | None:
    text = text.strip().replace(",", "")
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def anls(said: str, answers: Sequence[str], threshold: float = 0.5) -> float:
    """Normalised Levenshtein similarity to the closest answer; 0 up to the threshold (Biten et al. 2019, ST-VQA)."""
    best = 0.0
    for answer in answers:
        a, b = answer.strip().lower(), said.strip().lower()
        likeness = 1 - _distance(a, b) / max(len(a), len(b), 1)
        best = max(best, likeness if likeness > threshold else 0.0)
    return best


def _distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


# ---------------------------------------------------------------------- boxes
def box_from_text(text: str) -> Corners | None:
    """The first four numbers of a text as (x0, y0, x1, y1); None for fewer, or a box without area."""
    found = [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?|-?\.\d+", text)[:4]]
    if len(found) < 4 or not (found[0] < found[2] and found[1] < found[3]):
        return None
    return found[0], found[1], found[2], found[3]


def iou(a: Corners, b: Corners) -> float:
    """Area in both boxes over area in either, of (x0, y0, x1, y1) in one unit."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0.0) * max(height, 0.0)
    either = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both
    return both / either if either > 0 else 0.0
