"""HallusionBench (Guan et al. 2024): yes or no questions that pictures, edited pictures or no picture answer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from mmlens.errors import OptionError
from mmlens.tasks.base import Example
from mmlens.tasks.data import DataTask, encoded
from mmlens.tasks.rows import Fault, Folder, Hub, JsonList, Row, Rows
from mmlens.tasks.scoring import yes_no

ANSWERS = {"0": "no", "1": "yes"}
_UNSURE = re.compile(
    r"\b(uncertain|unsure|unclear|unknown|not (sure|certain|clear|possible)|do(es)?( not|n['’]t) (know|say|tell)"
    r"|(cannot|can['’]t|can not|impossible to|unable to)( be)? "
    r"(tell|say|determined?|answer(ed)?|know|known|confirm(ed)?|see))\b",
    re.IGNORECASE,
)


class HallusionBench(DataTask):
    """Yes or no; `summary` gives the authors' aAcc, fAcc and qAcc. Questions of the kind VS stand without picture too.

    An answer that says it cannot be told is right for a VS question without picture, and wrong elsewhere, as its
    authors count; they let a language model judge, here words decide.

    Parameters
    ----------
    subset
        "all"; "image" and "non_image": only questions with a picture, or without. The hub has the last two.
    """

    name = "hallusionbench"
    layout = "HallusionBench.json and hallusion_bench/ with the pictures, or hub:lmms-lab/HallusionBench"
    subsets: ClassVar[tuple[str, ...]] = ("all", "image", "non_image")
    candidates = ("yes", "no")
    chance = 0.5

    def open(self) -> Rows:
        self.folder: Folder | None = None
        if self.hub:
            if self.subset == "all":
                raise OptionError(
                    "subset='all' of HallusionBench from the hub",
                    expected="subset='image' or 'non_image'",
                    fix="the hub's copy has these two apart; give the authors' folder for both",
                )
            return Hub(self.hub, split=self.subset)
        self.folder = Folder(self.path, layout=self.layout)
        return JsonList(self.folder.first("HallusionBench.json"), layout=self.layout)

    def belongs(self, row: Row) -> bool:
        return self.hub is not None or self.subset == "all" or (row["filename"] is None) == (self.subset == "non_image")

    def record_id(self, row: Row) -> str:
        keys = ("category", "subcategory", "set_id", "figure_id", "question_id")
        return "_".join(str(row[key]) for key in keys)

    def group(self, row: Row) -> str:
        """The set: its questions are asked of several figures, and compared."""
        return f"{row['category']}_{row['subcategory']}_{row['set_id']}"

    def read(self, row: Row) -> Example:
        answer = ANSWERS.get(str(row["gt_answer"]))
        if answer is None:
            raise Fault(f"the answer {row['gt_answer']!r}, neither 0 nor 1")
        pictures: tuple[Path | bytes, ...] = ()
        if row.get("image") is not None:
            pictures = (encoded(row["image"]),)
        elif row.get("filename") is not None and self.folder is not None:
            pictures = (self.folder.find(row["filename"], "hallusion_bench"),)
        elif self.subset == "image":
            raise Fault("the record has no picture")
        return Example(
            id=self.record_id(row),
            question=f"{row['question']} Please answer yes or no.",
            answers=(answer,),
            images=pictures,
            choices=self.candidates,
            meta={key: str(row[key]) for key in ("category", "subcategory", "set_id", "figure_id", "question_id")},
        )

    def score(self, said: str, example: Example) -> float:
        if _UNSURE.search(said):
            return float(example.meta["category"] == "VS" and example.meta["figure_id"] == "0")
        return float(yes_no(said) == example.answer)

    def well_formed(self, said: str, example: Example) -> bool:
        return bool(_UNSURE.search(said)) or yes_no(said) is not None

    def summary(self, examples: Sequence[Example], said: Sequence[str]) -> dict[str, float]:
        """aAcc over questions; fAcc over figures and qAcc over question pairs, all of whose answers must be right."""
        if not examples:
            return {}
        figures: dict[tuple, list[float]] = defaultdict(list)
        pairs: dict[tuple, list[float]] = defaultdict(list)
        right = [self.score(text, example) for text, example in zip(said, examples)]
        for score, example in zip(right, examples):
            meta = example.meta
            place = (meta["category"], meta["subcategory"], meta["set_id"])
            pairs[(*place, meta["question_id"])].append(score)
            if (meta["category"], meta["figure_id"]) != ("VS", "0"):  # no figure there
                figures[(*place, meta["figure_id"])].append(score)
        return {
            "aAcc": sum(right) / len(right),
            "fAcc": sum(map(all, figures.values())) / len(figures) if figures else float("nan"),
            "qAcc": sum(map(all, pairs.values())) / len(pairs),
        }
