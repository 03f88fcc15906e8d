"""MMMU (Yue et al. 2024): college exam questions about one or several pictures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from mmlens.errors import OptionError
from mmlens.tasks.base import Example
from mmlens.tasks.data import encoded
from mmlens.tasks.mmlongbench_doc import literal_list
from mmlens.tasks.reading import Lettered, letters_for
from mmlens.tasks.rows import Fault, Folder, Hub, Parquet, Row, Rows
from mmlens.tasks.scoring import lettered
from mmlens.tasks.scoring_documents import open_match

_MARK = re.compile(r"<image (\d)>")


class Mmmu(Lettered):
    """Choices told by letters, and open questions; scored as its authors do, without their random guess.

    Pictures come in the order in which question and choices first name them, and are numbered so. The test half's
    answers are not public, so its records are faults.

    Parameters
    ----------
    subject
        One subject, such as "Art"; by default all. MMMU/MMMU on the hub has each as a config of its own, so there it
        must be given; lmms-lab/MMMU has all in one.
    """

    name = "mmmu"
    layout = (
        "parquet files of MMMU/MMMU (<subject>/validation-*.parquet) or of lmms-lab/MMMU (data/validation-*.parquet); "
        "or hub:MMMU/MMMU with subject=, or hub:lmms-lab/MMMU"
    )
    subsets: ClassVar[tuple[str, ...]] = ("validation", "dev", "test")

    def __init__(
        self, path: str | Path, *, subject: str | None = None, subset: str | None = None, batch: int = 1
    ) -> None:
        self.subject = subject
        self.options = {"subject": subject}
        super().__init__(path, subset=subset, batch=batch)

    def open(self) -> Rows:
        if self.hub:
            one = self.hub.lower() == "mmmu/mmmu"
            if one and self.subject is None:
                raise OptionError(
                    f"hub:{self.hub} without subject=",
                    expected="a subject, such as subject='Art'",
                    fix="give one, or use hub:lmms-lab/MMMU for all",
                )
            return Hub(self.hub, config=self.subject if one else None, split=self.subset)
        folder = Folder(self.path, layout=self.layout)
        patterns = [f"{place}{self.subset}*.parquet" for place in ("", "data/", "*/")]
        tables = folder.all(*patterns)
        return Parquet(tables or [folder.first(*patterns)], columns=("id",), layout=self.layout)

    def belongs(self, row: Row) -> bool:
        return self.subject is None or bool(re.fullmatch(rf"[a-z]+_{re.escape(self.subject)}_\d+", row["id"]))

    def record_id(self, row: Row) -> str:
        return str(row["id"])

    def read(self, row: Row) -> Example:
        options = literal_list(row["options"])
        open_question = row["question_type"] == "open"
        text = row["question"] + ("" if open_question else f"\n{lettered(options)}")
        marks = list(dict.fromkeys(_MARK.findall(text)))
        if not marks:
            raise Fault("the question names no picture")
        pictures = []
        for mark in marks:
            if row.get(f"image_{mark}") is None:
                raise Fault(f"the question names <image {mark}>, and the record lacks it")
            pictures.append(encoded(row[f"image_{mark}"]))
        text = _MARK.sub(lambda found: f"<image {marks.index(found[1]) + 1}>", text)
        answer = str(row["answer"])
        answers = tuple(map(str, literal_list(answer))) if open_question and answer.startswith("[") else (answer,)
        if answers in (("?",), ()) or (not open_question and answer not in letters_for(options)):
            raise Fault(f"the answer {answer!r} is none (the test half's are not public)")
        how = "Answer with a single word, number or phrase." if open_question else self.ask
        return Example(
            id=self.record_id(row),
            question=f"{text}\n{how}",
            answers=answers,
            images=tuple(pictures),
            choices=() if open_question else letters_for(options),
            meta={"options": () if open_question else tuple(map(str, options)), "subfield": row["subfield"]},
        )

    def score(self, said: str, example: Example) -> float:
        return super().score(said, example) if example.choices else float(open_match(said, example.answers))

    def well_formed(self, said: str, example: Example) -> bool:
        return super().well_formed(said, example) if example.choices else bool(said.strip())
