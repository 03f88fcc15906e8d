"""MMLongBench-Doc (Ma et al. 2024): questions about long documents, some of which they do not answer."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, ClassVar

from mmlens.evidence.regions import Page
from mmlens.tasks.base import Example
from mmlens.tasks.reading import PagedTask, shown_pages
from mmlens.tasks.rows import Fault, Folder, JsonList, Parquet, Row, Rows
from mmlens.tasks.scoring_documents import mmlongbench_doc_score

FORMATS = ("Str", "Int", "Float", "List", "None")
NONE = "Not answerable"
PICTURES = (".jpg", ".jpeg", ".png", ".webp")


class MMLongBenchDoc(PagedTask):
    """Questions about documents given as page pictures; the evidence is whole pages.

    The documents are PDFs: turn each page into a picture first, `pages/<document>/<page number from 1>.jpg`, with a
    document's name as in `doc_id` without ".pdf".

    Parameters
    ----------
    max_pages
        Pages shown at most: those of the evidence, then from the first on. By default all.
    """

    name = "mmlongbench-doc"
    layout = (
        "samples.json (in the folder or in data/) or the parquet file of yubo2333/MMLongBench-Doc, and pages of the "
        "documents as pages/<document>/<page number from 1>.jpg or .png"
    )
    subsets: ClassVar[tuple[str, ...]] = ("all",)
    max_new_tokens = 64

    def open(self) -> Rows:
        self.folder: Folder = self._folder()
        tables = self.folder.all("*.parquet", "data/*.parquet")
        if tables:
            return Parquet(tables, layout=self.layout)
        return JsonList(self.folder.first("samples.json", "data/samples.json"), layout=self.layout)

    def record_id(self, row: Row) -> str:
        return f"{row['doc_id']}: {row['question']}"

    def group(self, row: Row) -> str:
        return str(row["doc_id"])

    def _pages(self, document: str) -> list[Path]:
        """A document's page pictures, in order; a Fault if some are missing."""
        stem = document.removesuffix(".pdf")
        if "/" in stem or "\\" in stem or stem in ("", ".", ".."):
            raise Fault(f"a document named {document!r}")
        place = self.folder.root / "pages" / stem
        found = {}
        for path in place.iterdir() if place.is_dir() else ():
            if path.suffix.lower() in PICTURES and path.stem.isdigit():
                found[int(path.stem)] = self.folder.inside(str(path.relative_to(self.folder.root)))
        if not found:
            raise Fault(f"pages/{stem} has no page pictures")
        lacking = sorted(set(range(1, max(found) + 1)) - set(found))
        if lacking:
            raise Fault(f"page {lacking[0]} of pages/{stem} is missing")
        return [found[n] for n in range(1, max(found) + 1)]

    def read(self, row: Row) -> Example:
        if row["answer_format"] not in FORMATS:
            raise Fault(f"the answer format {row['answer_format']!r}")
        numbers, sources = literal_list(row["evidence_pages"]), literal_list(row["evidence_sources"])
        evidence = {number - 1 for number in numbers}  # pages are counted from 1 here
        if row["answer"] == NONE:
            evidence = set()
        pages = self._pages(row["doc_id"])
        shown = shown_pages(len(pages), evidence, self.max_pages)
        return Example(
            id=self.record_id(row),
            question=f"{row['question']} Answer as shortly as possible; if the pages do not tell, answer '{NONE}'.",
            answers=(str(row["answer"]),),
            pages=tuple(pages[p] for p in shown),
            evidence=tuple(Page(shown.index(p)) for p in sorted(evidence)),
            meta={
                "answer_format": row["answer_format"],
                "sources": tuple(sources),
                "type": row["doc_type"],
                "document_pages": tuple(p + 1 for p in shown),
            },
        )

    def score(self, said: str, example: Example) -> float:
        return mmlongbench_doc_score(said.strip(), example.answers[0], example.meta["answer_format"])


def literal_list(text: Any) -> list[Any]:
    """A list that stands as a Python literal in a string."""
    if isinstance(text, list):
        return text
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise Fault(f"{text!r} is no list")
    return found
