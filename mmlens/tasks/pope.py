"""POPE (Li et al. 2023, "Evaluating object hallucination in large vision-language models"): is there a thing or not."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from mmlens.tasks.base import Example
from mmlens.tasks.data import DataTask, Fault, encoded
from mmlens.tasks.rows import Folder, Hub, JsonLines, Parquet, Row, Rows
from mmlens.tasks.scoring import yes_no


class Pope(DataTask):
    """Yes or no questions about COCO pictures; no boxes.

    Layouts: the authors' `output/coco/coco_pope_{random,popular,adversarial}.json` (JSON lines) with pictures in
    `images/`, `val2014/` or beside them; or the parquet files of lmms-lab/POPE.
    """

    name = "pope"
    layout = (
        "coco_pope_random.json, coco_pope_popular.json or coco_pope_adversarial.json (JSON lines with question_id, "
        "image, text, label) and the COCO val2014 pictures, or the parquet files of lmms-lab/POPE"
    )
    subsets: ClassVar[tuple[str, ...]] = ("random", "popular", "adversarial")
    candidates = ("yes", "no")
    chance = 0.5

    def open(self) -> Rows:
        self.folder = None
        if self.hub:
            return Hub(self.hub, split="test")
        self.folder = Folder(self.path, layout=self.layout)
        tables = self.folder.all("*.parquet", "data/*.parquet")
        if tables:
            return Parquet(tables, columns=("id", "question_id", "category", "image_source"), layout=self.layout)
        return JsonLines(self.folder.first(f"**/coco_pope_{self.subset}.json"))

    def belongs(self, row: Row) -> bool:
        return bool(row.get("category", self.subset) == self.subset)

    def record_id(self, row: Row) -> str:
        return f"{row.get('category', self.subset)}/{row['question_id']}"

    def group(self, row: Row) -> str:
        return str(row["image_source"] if "image_source" in row else row["image"])

    def read(self, row: Row) -> Example:
        question, label = (row["text"], row["label"]) if "text" in row else (row["question"], row["answer"])
        if label not in self.candidates:
            raise Fault(f"the label {label!r}, neither yes nor no")
        picture = row["image"]
        if isinstance(picture, str) and self.folder is not None:
            picture = self.folder.find(picture, "images", "val2014", "images/val2014", "*/val2014")
        return Example(
            id=self.record_id(row),
            question=f"{question} Please answer yes or no.",
            answers=(label,),
            images=(picture if isinstance(picture, Path) else encoded(picture),),
            choices=self.candidates,
        )

    def score(self, said: str, example: Example) -> float:
        return float(yes_no(said) == example.answer)

    def well_formed(self, said: str, example: Example) -> bool:
        return yes_no(said) is not None
