"""MLVU (Zhou et al. 2025): questions about videos of minutes to hours, in nine tasks."""

from __future__ import annotations

from typing import ClassVar

from mmlens.errors import DataError
from mmlens.tasks.base import Example
from mmlens.tasks.data import Fault
from mmlens.tasks.reading import Lettered, letters_for
from mmlens.tasks.rows import Folder, Records, Row, Rows, load_json
from mmlens.tasks.scoring import lettered

TASKS = ("plotQA", "needle", "ego", "count", "order", "anomaly_reco", "topic_reasoning", "sub_scene", "summary")


class Mlvu(Lettered):
    """The seven tasks with choices, which are lettered here in the records' order.

    The other two (sub_scene, summary) ask for texts that their authors let a language model judge: faults.

    Parameters
    ----------
    subset
        "all", or one task.
    """

    name = "mlvu"
    layout = "json/1_plotQA.json ... json/9_summary.json and video/1_plotQA/<video>.mp4 ..., as in MLVU/MVLU's MLVU/"
    subsets: ClassVar[tuple[str, ...]] = ("all", *TASKS)

    def open(self) -> Rows:
        self.folder: Folder = self._folder()
        rows: list[Row] = []
        for number, task in enumerate(TASKS, 1):
            if self.subset not in ("all", task):
                continue
            name = f"{number}_{task}"
            paths = self.folder.all(f"{name}.json", f"json/{name}.json", f"MLVU/json/{name}.json")
            found = load_json(paths[0], layout=self.layout) if paths else []
            if not isinstance(found, list):
                raise DataError(
                    f"{paths[0]} holds {type(found).__name__}", expected=self.layout, fix="download it again"
                )
            rows += [{"record": r, "of": name, "number": i} for i, r in enumerate(found)]
        if not rows:
            self.folder.first(*(f"json/{i}_{task}.json" for i, task in enumerate(TASKS, 1)))
        return Records(rows)

    def record_id(self, row: Row) -> str:
        return f"{row['of']}/{row['number']}"

    def group(self, row: Row) -> str:
        """The video, which several tasks can ask about."""
        return str(row["record"]["video"])

    def read(self, row: Row) -> Example:
        record = row["record"]
        candidates = record.get("candidates")
        if not candidates:
            raise Fault("an open task, whose answers only a language model judges")
        texts = [str(c) for c in candidates]
        if texts.count(str(record["answer"])) != 1:
            raise Fault(f"the answer {record['answer']!r} is {texts.count(str(record['answer']))} of the choices")
        letters = letters_for(texts)
        places = [f"{p}{row['of']}" for p in ("video/", "MLVU/video/", "videos/", "")]
        return Example(
            id=self.record_id(row),
            question=f"{record['question']}\n{lettered(texts)}\n{self.ask}",
            answers=(letters[texts.index(str(record["answer"]))],),
            video=str(self.folder.find(record["video"], *places, "video", "videos")),
            choices=letters,
            meta={"options": tuple(texts), "task": row["of"].split("_", 1)[1], "type": record.get("question_type")},
        )
