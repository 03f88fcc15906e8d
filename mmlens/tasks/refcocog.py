"""RefCOCOg (Mao et al. 2016; splits of Nagaraja et al. 2016): expressions that pick one thing out of a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from mmlens.errors import DataError, OptionError
from mmlens.evidence.regions import Box, Polygon
from mmlens.model.pictures import load_picture
from mmlens.tasks.base import Example
from mmlens.tasks.coco import PLACES, BoxTask, Instances, outline_of
from mmlens.tasks.data import encoded
from mmlens.tasks.reading import one_of, subject_in
from mmlens.tasks.rows import Each, Fault, Folder, Hub, Parquet, Records, Row, Rows
from mmlens.tasks.scoring import exact
from mmlens.tasks.unpickle import load_plain

Ask = Literal["box", "category"]


class RefCocoG(BoxTask):
    """One example for each sentence: where is the thing, or what is it. The picture's other boxes are the distractors.

    Three forms are told apart by their files:

    - the authors' `refs(umd).p` and `instances.json`: UMD's splits val, test and train;
    - parquet of lmms-lab/RefCOCOg: pictures inside, no distractors. Its "val" has 7,573 records where UMD's has 2,573,
      so numbers on it are not on UMD val; `meta["split"]` says so;
    - parquet of jxu124/refcocog: UMD's splits without pictures or category names. The order of its boxes is told, for
      each record, by comparing with the annotation beside them.

    Parameters
    ----------
    ask
        "box", or "category": the name of the thing's category.
    evidence
        "box" or "segmentation".
    """

    name = "refcocog"
    layout = (
        "refs(umd).p and instances.json, in the folder or in refcocog/, and COCO's train2014 pictures in images/, "
        "train2014/ or images/train2014/; or the parquet files of lmms-lab/RefCOCOg; or those of jxu124/refcocog and "
        "the pictures"
    )
    subsets: ClassVar[tuple[str, ...]] = ("val", "test", "train")

    def __init__(
        self,
        path: str | Path,
        *,
        ask: Ask = "box",
        evidence: Literal["box", "segmentation"] = "box",
        subset: str | None = None,
        batch: int = 1,
    ) -> None:
        self.ask: Ask = one_of("ask", ask, ("box", "category"))
        self.options = {"ask": ask}
        super().__init__(path, evidence=evidence, subset=subset, batch=batch)

    # ------------------------------------------------------------------ the three forms
    def open(self) -> Rows:
        self.folder: Folder | None = None
        self.instances: Instances | None = None
        if self.hub:
            stream = Hub(self.hub, split=self.subset)
            if stream.names and "image" not in stream.names:
                raise DataError(
                    f"hub:{self.hub} has no pictures",
                    expected="lmms-lab/RefCOCOg, or a folder with this data set's parquet files and the pictures",
                    fix="download it beside COCO's train2014 pictures and give the folder",
                )
            self._need_names()
            return Each(stream, "answer")
        self.folder = Folder(self.path, layout=self.layout)
        if self.folder.all("**/*.parquet"):
            tables = self.folder.all(f"{self.subset}*.parquet", f"data/{self.subset}*.parquet")
            if not tables:
                raise DataError(
                    f"{self.path} has no parquet files of subset={self.subset!r}",
                    expected=self.layout,
                    fix="download this split too, or choose another",
                )
            self._need_names()
            columns = ("question_id", "file_name", "answer", "ref_id", "image_id", "split", "sentences")
            rows = Parquet(tables, columns=columns, layout=self.layout)
            return Each(rows, "sentences" if "raw_anns" in rows.names else "answer")
        refs = load_plain(self.folder.first("refs(umd).p", "refcocog/refs(umd).p"))
        if not isinstance(refs, list):
            raise DataError(f"refs(umd).p holds {type(refs).__name__}", expected=self.layout, fix="fetch it again")
        self.instances = Instances(self.folder.first("instances.json", "refcocog/instances.json"), layout=self.layout)
        return Each(Records(refs), "sentences")

    def _need_names(self) -> None:
        if self.ask == "category":
            raise OptionError(
                "ask='category' of a copy without category names",
                expected="the authors' refs(umd).p and instances.json",
                fix="use these, or ask='box'",
            )

    def belongs(self, row: Row) -> bool:
        return "sentences" not in row or {"validation": "val"}.get(row["split"], row["split"]) == self.subset

    def record_id(self, row: Row) -> str:
        if "sentences" not in row:
            return f"{row['question_id']}/{row['item']}"
        return f"{row['ref_id']}/{row['sentences'][row['item']]['sent_id']}"

    def group(self, row: Row) -> str:
        return str(row["image_id"] if "sentences" in row else row["file_name"])

    # ------------------------------------------------------------------ records
    def read(self, row: Row) -> Example:
        if "raw_anns" in row:
            return self._copied(row)
        if "sentences" not in row:
            return self._shipped(row)
        assert self.instances is not None and self.folder is not None
        annotation = self.instances.annotations.get(row["ann_id"])
        if annotation is None:
            raise Fault(f"annotation {row['ann_id']} is not in the instances file")
        # the ref's own file_name has the annotation's id in it and names no file
        words = row["sentences"][row["item"]]["sent"]
        example = self.annotated(
            words,
            annotation,
            self.instances,
            self.folder,
            row["image_id"],
            id=self.record_id(row),
            meta={"split": f"UMD {self.subset}", "annotation": annotation["id"]},
        )
        return example if self.ask == "box" else self._named(example, words)

    def _named(self, example: Example, words: str) -> Example:
        assert self.instances is not None
        question = f"What kind of thing is {words}? Answer with its name."
        return replace(
            example,
            question=question,
            answers=(example.meta["category"],),
            subject=subject_in(question, words, "is ", "?"),
            choices=tuple(sorted(self.instances.categories.values())),
        )

    def _shipped(self, row: Row) -> Example:
        """A record of lmms-lab/RefCOCOg. Its question is the same for all; its answers are the expressions."""
        picture = encoded(row["image"])
        flat = row.get("segmentation")
        return self.located(
            row["answer"][row["item"]],
            Box.from_xywh(*row["bbox"]),
            Polygon.from_flat([flat]) if flat and not row.get("iscrowd") and len(flat) >= 6 else None,
            load_picture(picture).size,
            id=self.record_id(row),
            images=(picture,),
            meta={
                "split": f"lmms-lab {self.subset}" + (", which is not UMD val" if self.subset == "val" else ""),
                "annotation": row["question_id"],
            },
        )

    def _copied(self, row: Row) -> Example:
        """A record of jxu124/refcocog."""
        assert self.folder is not None
        raw, image = json.loads(row["raw_anns"]), json.loads(row["raw_image_info"])
        annotation = raw if isinstance(raw, dict) else next((a for a in raw if a["id"] == row["ann_id"]), None)
        if annotation is None:
            raise Fault(f"annotation {row['ann_id']} is not in raw_anns")
        box = Box.from_xywh(*annotation["bbox"])
        if not (_same(row["bbox"], annotation["bbox"]) or _same(row["bbox"], box.corners)):
            raise Fault(f"the box {row['bbox']} is neither of raw_anns' {annotation['bbox']} nor of its corners")
        size = (image["width"], image["height"])
        return self.located(
            row["sentences"][row["item"]]["sent"],
            box,
            outline_of(annotation),
            size,
            id=self.record_id(row),
            images=(self.folder.find(image["file_name"], *PLACES),),
            meta={"picture_size": size, "split": f"UMD {self.subset}", "annotation": row["ann_id"]},
        )

    # ------------------------------------------------------------------ answers
    def score(self, said: str, example: Example) -> float:
        return super().score(said, example) if self.ask == "box" else float(exact(said, example.answers))

    def well_formed(self, said: str, example: Example) -> bool:
        return super().well_formed(said, example) if self.ask == "box" else exact(said, example.choices)


def _same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= 0.01 for x, y in zip(a, b))
