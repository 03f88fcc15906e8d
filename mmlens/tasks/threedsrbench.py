"""3DSRBench (Ma et al. 2025): heights, places and directions in space; each question also with other orders."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, ClassVar
from urllib.parse import urlsplit

from mmlens.tasks.base import Example
from mmlens.tasks.data import encoded
from mmlens.tasks.reading import Lettered, letters_for
from mmlens.tasks.rows import Fault, Folder, Hub, Parquet, Row, Rows, Tsv
from mmlens.tasks.scoring import lettered

SHORTEST_PICTURE = 64  # characters; a shorter cell is the index of the row that has the picture (VLMEvalKit's TSV)


class ThreeDSRBench(Lettered):
    """Choices told by letters; `summary` counts a question only if all its variants are right.

    A question's id tells its variants: "AB12CD34" as asked, "-1" with its choices in another order, "-flip" and
    "-flip-1" for the mirrored picture.

    Parameters
    ----------
    subset
        "circular": with all variants; "plain": each question once.
    """

    name = "3dsrbench"
    layout = (
        "3dsrbench_v1_vlmevalkit_circular.tsv (pictures inside, base64); or parquet files with image, or with "
        "image_url and the pictures in coco_images/ or images/; or hub:oscarqjh/3DSRBench_lmmseval"
    )
    subsets: ClassVar[tuple[str, ...]] = ("circular", "plain")

    def open(self) -> Rows:
        self.folder: Folder | None = None
        self._places: dict[str, tuple[Any, str]] = {}  # index -> where its row is, and what its picture is
        if self.hub:
            return Hub(self.hub, config="3dsr_circular" if self.subset == "circular" else "3dsr")
        self.folder = Folder(self.path, layout=self.layout)
        tables = self.folder.all("*.tsv")
        chosen = [p for p in tables if ("circular" in p.name) == (self.subset == "circular")]
        if chosen:
            rows = Tsv(chosen[0])
            for position, row in rows:
                if isinstance(row, dict) and "index" in row:
                    cell = row.get("image") or ""
                    told = cell if len(cell) <= SHORTEST_PICTURE else hashlib.sha256(cell.encode()).hexdigest()
                    self._places[row["index"]] = position, told
            self.rows = rows
            return rows
        patterns = ("*.parquet", "data/*.parquet", "*/*.parquet")
        columns = ("index", "qid", "image_url", "category")
        found = self.folder.all(*patterns) or [self.folder.first("*.tsv", *patterns)]
        return Parquet(found, columns=columns, layout=self.layout)

    def record_id(self, row: Row) -> str:
        return str(row.get("qid") or row["index"])

    def group(self, row: Row) -> str:
        if row.get("image_url"):
            return str(row["image_url"])
        place = self._places.get(row.get("index", ""))
        if place is None:
            return self.record_id(row).split("-")[0]
        return self._places[place[1]][1] if place[1] in self._places else place[1]

    def _picture(self, row: Row) -> Any:
        cell = row.get("image")
        if isinstance(cell, str) and cell:
            if len(cell) <= SHORTEST_PICTURE and cell in self._places:
                cell = self.rows.get(self._places[cell][0])["image"]
            try:
                return base64.b64decode(cell, validate=True)
            except (binascii.Error, ValueError):
                raise Fault("a picture that is no base64") from None
        if cell is not None and cell != "":
            return encoded(cell)
        if self.folder is None or not row.get("image_url"):
            raise Fault("the record has no picture")
        return self.folder.find(PurePosixPath(urlsplit(row["image_url"]).path).name, "coco_images", "images", "*")

    def read(self, row: Row) -> Example:
        cells = {k: row.get(k) for k in "ABCD"}
        options = [str(v) for v in cells.values() if v is not None and str(v).lower() not in ("", "nan")]
        kept = [k for k, v in cells.items() if v is not None and str(v).lower() not in ("", "nan")]
        letters = letters_for(options)
        if tuple(kept) != letters or row["answer"] not in letters:
            raise Fault(f"the answer {row['answer']!r} to the choices {', '.join(kept)}")
        return Example(
            id=self.record_id(row),
            question=f"{row['question']}\n{lettered(options)}\n{self.ask}",
            answers=(row["answer"],),
            images=(self._picture(row),),
            choices=letters,
            meta={"options": tuple(options), "category": row.get("category"), "qid": self.record_id(row)},
        )

    def summary(self, examples: Sequence[Example], said: Sequence[str]) -> dict[str, float]:
        """Accuracy over questions all of whose variants here are right: flipped, reordered, and both."""
        keys = {
            "flip": lambda qid: qid.replace("-flip", ""),
            "circular": lambda qid: re.sub(r"-\d+$", "", qid),
            "flip_circular": lambda qid: re.sub(r"-\d+$", "", qid).replace("-flip", ""),
        }
        right = [self.score(text, example) for text, example in zip(said, examples)]
        found = {}
        for name, key in keys.items():
            groups: dict[str, list[float]] = defaultdict(list)
            for score, example in zip(right, examples):
                groups[key(example.meta["qid"])].append(score)
            if groups:
                found[name] = sum(map(all, groups.values())) / len(groups)
        return found
