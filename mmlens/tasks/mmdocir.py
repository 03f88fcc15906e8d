"""MMDocIR (Dong et al. 2025): questions about long documents, with the places on their pages that answer them."""

from __future__ import annotations

from typing import Any, ClassVar

from mmlens.evidence.regions import Box, Page, PageRegion, Region
from mmlens.tasks.base import Example
from mmlens.tasks.data import encoded
from mmlens.tasks.reading import PagedTask, shown_pages
from mmlens.tasks.rows import Each, Fault, Folder, JsonLines, Parquet, Row, Rows
from mmlens.tasks.scoring import anls, exact

SLACK = 0.02  # of a page's side: a box that leaves the page by more is wrong, not inexact


class MMDocIR(PagedTask):
    """Questions about documents given as page pictures; the evidence is boxes on pages, or pages where there are none.

    The set is made for retrieval and has no score for answers; here they are scored by ANLS.

    Parameters
    ----------
    max_pages
        Pages shown at most: those of the evidence, then from the first on. By default all.
    """

    name = "mmdocir"
    layout = "MMDocIR_annotations.jsonl and MMDocIR_pages.parquet, in the folder or in dataset/"
    subsets: ClassVar[tuple[str, ...]] = ("all",)
    max_new_tokens = 64

    def open(self) -> Rows:
        folder: Folder = self._folder()
        places = ("", "dataset/")
        tables = [folder.first(*(f"{p}MMDocIR_pages.parquet" for p in places))]
        self.pages = Parquet(tables, columns=("doc_name",), layout=self.layout)
        return Each(JsonLines(folder.first(*(f"{p}MMDocIR_annotations.jsonl" for p in places))), "questions")

    def record_id(self, row: Row) -> str:
        return f"{row['doc_name']}/{row['item']}"

    def group(self, row: Row) -> str:
        return str(row["doc_name"])

    def read(self, row: Row) -> Example:
        asked = row["questions"][row["item"]]
        first, last = row["page_indices"]  # rows of the parquet file, both included
        n = last - first + 1
        numbers = set(asked["page_id"]) | {layout["page"] for layout in asked["layout_mapping"]}
        shown = shown_pages(n, numbers, self.max_pages)
        pages = []
        for p in shown:
            page = self.pages.nth(first + p)
            if page["doc_name"] != row["doc_name"]:
                raise Fault(f"row {first + p} of the pages is of {page['doc_name']!r}, not of {row['doc_name']!r}")
            pages.append(encoded(page["image_binary"]))
        regions: list[Region] = [_place(layout, shown) for layout in asked["layout_mapping"]]
        return Example(
            id=self.record_id(row),
            question=f"{asked['Q']} Answer as shortly as possible.",
            answers=(str(asked["A"]),),
            pages=tuple(pages),
            evidence=tuple(regions or (Page(shown.index(p)) for p in sorted(numbers))),
            meta={"domain": row["domain"], "type": asked["type"], "document_pages": tuple(shown)},
        )

    def score(self, said: str, example: Example) -> float:
        return 1.0 if exact(said, example.answers) else anls(said, example.answers)


def _place(layout: Row, shown: list[int]) -> PageRegion:
    """A box on a page, in points of the page's own size."""
    width, height = layout["page_size"]
    x0, y0, x1, y1 = layout["bbox"]
    if min(x0 / width, y0 / height) < -SLACK or max(x1 / width, y1 / height) > 1 + SLACK:
        raise Fault(f"the box {[x0, y0, x1, y1]} leaves its page of {width:g} x {height:g} points")
    inside: tuple[Any, ...] = (max(x0, 0), max(y0, 0), min(x1, width), min(y1, height))
    return PageRegion(
        shown.index(layout["page"]), Box.from_xyxy(*inside, units="points", page_size=(float(width), float(height)))
    )
