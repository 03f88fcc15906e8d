"""How the authors of document question sets score answers: MMLongBench-Doc, MMLongBench, MMMU's open questions."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from math import isclose, isfinite
from typing import Any

from mmlens.tasks.rows import Fault
from mmlens.tasks.scoring import anls, f1, numbers

# ---------------------------------------------------------------------- MMLongBench-Doc
_EXACT = re.compile(
    r".*https://.*|.*\.py|.*ipynb|page.*|\d+([-\s]\d+)?|.*[ap]\.m\..*|\d{4}[-\s]\d{2}([-\s]\d{2})?"
    r"|[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}",
    re.DOTALL,
)


def mmlongbench_doc_score(said: str, answer: str, answer_format: str) -> float:
    """Score of an answer, by its format (`eval_score` of mayubo2333/MMLongBench-Doc).

    Int: equal. Float: within 1 %, also where one of them is a percentage. Str and None: ANLS above 0.5, but exact for
    addresses, dates, times and page names. List: the same length, sorted; exact for numbers, else the worst pair's
    ANLS. The authors first let a language model shorten what was said; here it is taken as it is.
    """
    if answer_format == "Int":
        mine, gold_number = _float(said), _float(answer)
        return float(mine is not None and isfinite(mine) and int(mine) == gold_number)
    if answer_format == "Float":
        mine, gold = _float(_clean(said)), _float(_clean(answer))
        return float(mine is not None and gold is not None and _close(gold, mine))
    if answer_format in ("Str", "None"):
        return _string(_clean(said), _clean(answer))
    gold_list, mine_list = sorted(map(_clean, _listed(answer))), sorted(map(_clean, _listed(said)))
    if len(gold_list) != len(mine_list) or not gold_list:
        return 0.0
    if _float(gold_list[0]) is not None or _EXACT.fullmatch(gold_list[0]):
        return float(gold_list == mine_list)
    return min(anls(mine, [gold]) for mine, gold in zip(mine_list, gold_list))


def _string(mine: str, gold: str) -> float:
    return float(mine == gold) if _EXACT.fullmatch(gold) else anls(mine, [gold])


def _clean(text: Any) -> str:
    text = re.sub(r"\s*\([^)]*\)", "", str(text).lower().strip()).strip()
    return re.sub(r"^['\"]|['\"]$", "", text).strip().lstrip("$").strip().rstrip("%").strip()


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _close(gold: float, mine: float) -> bool:
    return any(isclose(g, mine, rel_tol=0.01) or round(g, 2) == round(mine, 2) for g in (gold / 100, gold, gold * 100))


def _listed(text: str) -> list[Any]:
    if text.strip().startswith("["):
        try:
            found = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return [text]
        return found if isinstance(found, list) else [text]
    return [text]


# ---------------------------------------------------------------------- MMLongBench
_UNITS = ("kg", "meters", "acres", "minutes", "miles", "mile", "feet", "million", "thousand", "billion", "mm", "m")
_WHOLE = (
    r"https://",
    r"\.(py|ipynb)$",
    r"^page",
    r"^\d+(-\d+|\s\d+)?$",
    r"(a\.m\.|p\.m\.)",
    r"^\d{4}[-/\s]\d{1,2}([-/\s]\d{1,2})?$",
    r"^\d{1,2}[-/\s]\d{1,2}[-/\s]\d{2,4}$",
    r"^[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}$",
)


def docqa_score(said: str, answer: str, answer_format: str) -> float:
    """Score of an answer, by its format (`eval_docqa_score` of EdinburghNLP/MMLongBench).

    Integer and Float: any number in the text. String: F1 of words, or contained where it is an address, a date or the
    like. List: the mean over its parts, word parts taken together.
    """
    kind = {"Int": "Integer", "Str": "String"}.get(answer_format, answer_format)
    if kind == "Integer":
        return float(float(_bare(answer)) in [n for n in numbers(_bare(said)) if n == int(n)])
    if kind == "Float":
        gold = float(_bare(answer))
        options = (gold / 100, gold, gold * 100)
        return float(any(isclose(g, n, rel_tol=0.01) for n in numbers(_bare(said)) for g in options))
    if kind in ("String", "None"):
        return float(answer in said) if _whole(answer) else f1(said, answer)
    parts = json.loads(answer)
    if kind != "List" or not isinstance(parts, list) or not parts:
        raise Fault(f"an answer {answer!r} of the format {answer_format!r}")
    words = [p for p in parts if isinstance(p, str) and _kind(p) == "String" and not _whole(p)]
    rest = [p for p in parts if p not in words]
    parts = ([" ".join(words)] if words else []) + rest
    return sum(docqa_score(said, str(p), _kind(str(p))) for p in parts) / len(parts)


def _bare(text: str) -> str:
    text = text.lower().strip().replace(",", "")
    for unit in _UNITS:
        text = re.sub(rf"{unit}$", "", text).strip()
    text = re.sub(r"^['\"]|['\"]$", "", text).strip()
    return text.strip("$").strip().strip("£").strip().strip("%").strip()


def _whole(text: str) -> bool:
    return any(re.search(p, text) for p in _WHOLE)


def _kind(text: str) -> str:
    number = _float(_bare(text))
    if number is None or not isfinite(number):
        return "String"
    return "Integer" if number == int(number) and "%" not in text else "Float"


# ---------------------------------------------------------------------- MMMU
_LEADS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")


def open_match(said: str, answers: Sequence[str]) -> bool:
    """Whether an open answer holds an accepted one (MMMU's `parse_open_response` and `eval_open`).

    Words must stand in a key part of what was said: what follows the last "is", "so", "=", ... of a sentence. Numbers
    must be equal after rounding to two places.
    """
    text = said.strip().strip(".").lower()
    parts = [p for p in re.split(r"\.\s(?=[a-z])|\n", text) if p.strip()]
    keys = []
    for i, part in enumerate(parts):
        leads = (*_LEADS, "=") if i == len(parts) - 1 else _LEADS
        tails = [part.rsplit(lead, 1)[1].strip() for lead in leads if lead in part]
        tails = [t for t in tails if t and t not in (":", ",", ".", "!", "?", ";", "'")]
        if tails:
            keys.append(min(tails, key=len))
    keys = keys or [text]
    values = {round(n, 2) for key in keys for n in numbers(key)}
    for answer in answers:
        number = _float(answer.strip().replace(",", ""))
        if number is not None:
            if round(number, 2) in values:
                return True
        elif any(_stands(answer.strip().lower(), key) for key in keys):
            return True
    return False


def _stands(answer: str, key: str) -> bool:
    """A single letter only as a word of its own ("trivial matches" in MMMU's words)."""
    return bool(answer) and (answer in key if len(answer) > 1 else answer in key.split())
