"""Things to be found in pictures: questions answered with a box, and COCO-style instances of anybody's pictures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from mmlens.errors import DataError
from mmlens.evidence.regions import Box, Mask, Polygon
from mmlens.tasks.base import Example
from mmlens.tasks.data import DataTask, box_inside
from mmlens.tasks.reading import one_of, subject_in
from mmlens.tasks.rows import Fault, Folder, Records, Row, Rows, load_json
from mmlens.tasks.scoring import box_from_text, iou

HOW = "Answer with its box as x0, y0, x1, y1 in thousandths of the picture."
PLACES = ("images", "train2014", "val2014", "train2017", "val2017", "images/*", "*/train2014", "*/val2014")


class BoxTask(DataTask):
    """Questions where something is, answered with a box "x0, y0, x1, y1" in thousandths (0..1000) of the picture.

    An answer is right if it overlaps the thing's box with an intersection over union of at least 0.5.

    Parameters
    ----------
    evidence
        "box", or "segmentation": the thing's outline or mask (records without one are then skipped).
    """

    max_new_tokens = 32

    def __init__(
        self,
        path: str | Path,
        *,
        evidence: Literal["box", "segmentation"] = "box",
        subset: str | None = None,
        batch: int = 1,
    ) -> None:
        self.evidence = one_of("evidence", evidence, ("box", "segmentation"))
        self.options = {**self.options, "evidence": evidence}
        super().__init__(path, subset=subset, batch=batch)

    def located(
        self, words: str, box: Box, outline: Polygon | Mask | None, size: tuple[int, int], **more: Any
    ) -> Example:
        """The example that asks where `words` is; `box` in pixels of a picture of `size`."""
        box_inside(box, *size)
        if self.evidence == "segmentation" and outline is None:
            raise Fault("the record has no segmentation")
        whole = box.clip(*size)
        thousandths = tuple(1000 * v / size[i % 2] for i, v in enumerate(whole.corners))
        meta = {"box": thousandths, **({"segmentation": outline} if outline else {}), **more.pop("meta", {})}
        question = f"Where is {words}? {HOW}"
        return Example(
            question=question,
            answers=(", ".join(str(round(v)) for v in thousandths),),
            subject=subject_in(question, words, "is ", "?"),
            evidence=(box if self.evidence == "box" or outline is None else outline,),
            meta=meta,
            **more,
        )

    def annotated(
        self, words: str, annotation: Row, instances: Instances, folder: Folder, image_id: Any, *, id: str, meta: Row
    ) -> Example:
        """The example that asks where an annotated thing of an instances file is; others of its picture distract."""
        size = instances.size(image_id)
        return self.located(
            words,
            Box.from_xywh(*annotation["bbox"]),
            outline_of(annotation),
            size,
            id=id,
            images=(folder.find(instances.images[image_id]["file_name"], *PLACES),),
            distractors=instances.others(annotation),
            meta={"picture_size": size, "category": instances.categories[annotation["category_id"]], **meta},
        )

    def score(self, said: str, example: Example) -> float:
        box = box_from_text(said)
        return float(box is not None and iou(box, example.meta["box"]) >= 0.5)

    def well_formed(self, said: str, example: Example) -> bool:
        box = box_from_text(said)
        return box is not None and min(box) >= 0 and max(box) <= 1000


class Instances:
    """A COCO-style instances file: `images`, `annotations` with bbox [x, y, width, height] in pixels, `categories`."""

    def __init__(self, path: Path, *, layout: str) -> None:
        found = load_json(path, layout=layout)
        lists = found if isinstance(found, dict) else {}
        try:
            self.images: dict[Any, Row] = {image["id"]: image for image in lists["images"]}
            self.annotations: dict[Any, Row] = {a["id"]: a for a in lists["annotations"]}
            self.categories: dict[Any, str] = {c["id"]: c["name"] for c in lists["categories"]}
            self.on: dict[Any, list[Row]] = defaultdict(list)
            for annotation in lists["annotations"]:
                self.on[annotation["image_id"]].append(annotation)
        except (KeyError, TypeError) as error:
            raise DataError(
                f"{path} is no instances file: {error}", expected=layout, fix="check which file this is"
            ) from None

    def size(self, image_id: Any) -> tuple[int, int]:
        """(width, height) that the file says; a Fault where it does not know the picture."""
        image = self.images.get(image_id)
        if image is None:
            raise Fault(f"picture {image_id!r} is not in the instances file")
        return image["width"], image["height"]

    def others(self, annotation: Row) -> tuple[Box, ...]:
        """Boxes of the picture's other things."""
        width, height = self.size(annotation["image_id"])
        boxes = []
        for other in self.on[annotation["image_id"]]:
            # a crowd's box goes round many things, among them perhaps the asked one
            if other["id"] == annotation["id"] or other.get("iscrowd") or min(other["bbox"][2:]) <= 0:
                continue
            box = Box.from_xywh(*other["bbox"])
            if box.x0 < width and box.y0 < height and box.x1 > 0 and box.y1 > 0:
                boxes.append(box)
        return tuple(boxes)


def outline_of(annotation: Mapping[str, Any]) -> Polygon | Mask | None:
    """An annotation's `segmentation`: outlines, or run lengths (plain or compressed); None where it has none."""
    found = annotation.get("segmentation")
    if isinstance(found, Mapping):
        height, width = found["size"]
        return Mask.from_rle(found["counts"], size=(height, width))
    rings = [ring for ring in found or () if len(ring) >= 6]  # COCO has a few outlines of two points
    return Polygon.from_flat(rings) if rings else None


class CocoInstances(BoxTask):
    """Where is the one dog? Of every picture each category that it shows exactly once, from a COCO-style file.

    The picture's other boxes are the distractors.

    Parameters
    ----------
    subset
        "any" for the only instances file of the folder, else the one with this word in its name.
    evidence
        "box" or "segmentation".
    """

    name = "coco"
    layout = (
        "one instances*.json (COCO: images, annotations with bbox [x, y, width, height], categories), in the folder or "
        "in annotations/, and the pictures that it names, in the folder or in images/, train2017/, ..."
    )
    subsets: ClassVar[tuple[str, ...]] = ("any", "val", "train", "test")

    def open(self) -> Rows:
        self.folder: Folder = self._folder()
        word = "" if self.subset == "any" else f"*{self.subset}"
        found = self.folder.all(f"instances{word}*.json", f"annotations/instances{word}*.json")
        if len(found) != 1:
            raise DataError(
                f"{len(found)} instances files for subset={self.subset!r} in {self.path}",
                expected=self.layout,
                fix="choose one with subset=" if found else "check the folder",
            )
        self.instances = Instances(found[0], layout=self.layout)
        rows = []
        for image_id, things in self.instances.on.items():
            counts = Counter(a["category_id"] for a in things)
            rows += [
                {"annotation": a, "image_id": image_id}
                for a in things
                if counts[a["category_id"]] == 1 and not a.get("iscrowd")
            ]
        records = Records(rows)
        records.source = str(found[0])
        return records

    def record_id(self, row: Row) -> str:
        return str(row["annotation"]["id"])

    def group(self, row: Row) -> str:
        return str(row["image_id"])

    def read(self, row: Row) -> Example:
        annotation = row["annotation"]
        words = f"the {self.instances.categories[annotation['category_id']]}"
        picture = self.instances, self.folder, row["image_id"]
        return self.annotated(words, annotation, *picture, id=self.record_id(row), meta={})
