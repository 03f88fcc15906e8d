"""MMLongBench (Wang et al. 2025): long documents, many pictures, needles in haystacks, examples to learn from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mmlens.errors import DataError, OptionError
from mmlens.evidence.regions import Page
from mmlens.tasks.base import Example
from mmlens.tasks.data import DataTask
from mmlens.tasks.reading import letters_for, one_of
from mmlens.tasks.rows import Fault, Folder, JsonLines, Records, Row, Rows, load_json
from mmlens.tasks.scoring import answer_part, choice_letter, contains, last_yes_no, numbers
from mmlens.tasks.scoring_documents import docqa_score

NIAH = tuple(f"{what}-{where}" for what in ("retrieval", "counting", "reasoning") for where in ("image", "text"))
KINDS = {
    **dict.fromkeys(("mmlongdoc", "longdocurl", "slidevqa"), "docqa"),
    **dict.fromkeys(("infoseek", "viquae"), "vrag"),
    **dict.fromkeys(("vh_single", "vh_multi"), "vh"),
    **dict.fromkeys(NIAH, "niah"),
    **dict.fromkeys(("cars196", "food101", "inat2021", "sun397"), "icl"),
}
SUMMARIES = ("gov-report", "multi-lexsum", "summ")
LENGTHS = ("K8", "K16", "K32", "K64", "K128", "K4")
MARK = "<image>"
ANSWER = "Write your answer in the following format:\nAnswer: [answer]"
NAMES = {
    "docqa": "documentQA/{}_{}.jsonl",
    "vrag": "vrag/{}_{}_dep*.jsonl",
    "vh": "NIAH/{}_test_*_{}_dep*.jsonl",
    "niah": "NIAH/{}_test_{}_dep*.jsonl",
    "icl": "ICL/{}_{}.json",
}


class MMLongBench(DataTask):
    """One of MMLongBench's data sets, at one length; prompts after its authors' templates, all pictures first.

    Evidence is known for document questions (the pages with the answer) and for learning from examples (the pictures
    of the right class). Summaries are left out: their score compares texts of hundreds of words.

    Parameters
    ----------
    subset
        Documents: "mmlongdoc", "longdocurl", "slidevqa". Retrieved texts: "infoseek", "viquae". Visual haystacks:
        "vh_single", "vh_multi". MM-NIAH: "retrieval-image", "counting-text", ... Examples: "cars196", "food101",
        "inat2021", "sun397".
    length
        "K4" to "K128" (thousands of tokens).
    """

    name = "mmlongbench"
    layout = (
        "mmlb_data/ (documentQA/mmlongdoc_K8.jsonl, vrag/..., NIAH/..., ICL/...) and mmlb_image/ with the pictures, "
        "unpacked from the .tar.gz files of ZhaoweiWang/MMLongBench (mmlens.tasks.archives.extract does it)"
    )
    subsets: ClassVar[tuple[str, ...]] = tuple(KINDS)
    max_new_tokens = 128

    def __init__(self, path: str | Path, *, length: str = "K8", subset: str | None = None, batch: int = 1) -> None:
        if subset in SUMMARIES:
            raise OptionError(
                f"subset={subset!r} of mmlongbench",
                expected=f"one of {', '.join(self.subsets)}",
                fix="summaries have no short answer that could be teacher-forced or judged; choose another",
            )
        self.length = one_of("length", length, LENGTHS)
        self.options = {"length": length}
        super().__init__(path, subset=subset, batch=batch)

    def open(self) -> Rows:
        self.kind = KINDS[self.subset]
        self.folder: Folder = self._folder()
        name = NAMES[self.kind].format(self.subset, self.length)
        path = self.folder.first(f"mmlb_data/{name}", name)
        if self.kind != "icl":
            return JsonLines(path)
        domains = load_json(path, layout=self.layout)
        try:
            rows = [
                {"id": f"{domain}/{i}", "test": test, "exemplars": found["exemplar_list"]}
                for domain, found in domains.items()
                for i, test in enumerate(found["test_example"])
            ]
        except (AttributeError, KeyError, TypeError) as error:
            raise DataError(f"{path}: {error}", expected=self.layout, fix="download it again") from None
        return Records(rows)

    def record_id(self, row: Row) -> str:
        return str(row["id"] if "id" in row else f"{row['doc_name']}: {row['question']}")

    def group(self, row: Row) -> str:
        """Document or asked picture; haystacks (which share pictures among all records) go by their question's id."""
        if self.kind == "docqa":
            return str(row["doc_name"])
        if self.kind == "icl":
            return str(row["test"]["image"])
        return str(row["image"] if self.kind == "vrag" else row["id"])

    def _pictures(self, names: Sequence[Any]) -> tuple[Path, ...]:
        return tuple(self.folder.find(name, "mmlb_image") for name in names)

    def read(self, row: Row) -> Example:
        return getattr(self, f"_{self.kind}")(row)

    # ------------------------------------------------------------------ by kind
    def _docqa(self, row: Row) -> Example:
        docqa_score("", str(row["answer"]), row["answer_format"])  # raises for an answer of another format
        names, document = row["page_list"], str(row["doc_name"])
        places = [_page_of(name) for name in names]
        mine = [page if document.removesuffix(".pdf") in documents else None for documents, page in places]
        evidence = []
        for number in row["ans_page_list"]:  # of the original document, from 0; page_list is cut or padded
            if number not in mine:
                raise Fault(f"page {number} (from 0) of {document} is not among the pages shown")
            evidence.append(mine.index(number))
        listed = "\n".join(f"Picture {i}: document {d[0]:.15} (page {p})" for i, (d, p) in enumerate(places, 1))
        return Example(
            id=self.record_id(row),
            question=f"{listed}\n\nAnswer the question as concisely as you can, with a phrase if possible. If the "
            f"pages do not tell, write 'Not answerable.' {ANSWER}\n\nQuestion: Based on document {document:.15}, "
            f"answer the following question. {row['question']}",
            answers=(str(row["answer"]),),
            pages=self._pictures(names),
            evidence=tuple(Page(i) for i in dict.fromkeys(evidence)),
            meta={"answer_format": row["answer_format"]},
        )

    def _vrag(self, row: Row) -> Example:
        texts = "\n\n".join(f"Document (Title: {c['title']}): {c['text']}" for c in row["ctxs"])
        answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        flat = [a for answer in answers for a in (answer if isinstance(answer, list) else [answer])]
        return Example(
            id=self.record_id(row),
            question=f"Use the given documents to write a concise and short answer to the question about the entity "
            f"shown in the image. {ANSWER}\n\n{texts}\n\nQuestion: {row['question']}",
            answers=tuple(map(str, flat)),
            images=self._pictures([row["image"]]),
        )

    def _vh(self, row: Row) -> Example:
        gold = last_yes_no(str(row["answer"]))
        if gold is None:
            raise Fault(f"the answer {row['answer']!r}, neither yes nor no")
        return Example(
            id=self.record_id(row),
            question=f"You are given a set of images. Please answer the question in Yes or No based on the given "
            f"images. {ANSWER}\n\nQuestion: {row['question']}",
            answers=(gold,),
            images=self._pictures(row["ctxs"]),
            choices=("yes", "no"),
        )

    def _niah(self, row: Row) -> Example:
        text = "\n\n".join(c["text"] for c in row["ctxs"]) + f"\n\nQuestion: {row['question']}"
        # needle and choice pictures come last, as their marks do: in the question, and in the choices after it
        choices = row.get("choices_image") or []
        text += "".join(f"\n{letter}. {MARK}" for letter in (letters_for(choices) if choices else ()))
        names = [*(row.get("image_list") or []), *(row.get("needle_image_list") or []), *choices]
        if text.count(MARK) != len(names):
            raise Fault(f"{text.count(MARK)} marks for {len(names)} pictures")
        answers: tuple[str, ...] = (str(row["answer"]),)
        if choices:
            answers = (letters_for(choices)[int(row["answer"])],)
        elif isinstance(row["answer"], list) and not self.subset.startswith("counting"):
            answers = tuple(map(str, row["answer"]))
        how = "Answer with the option's letter." if choices else ""
        return Example(
            id=self.record_id(row),
            question=f"You are given interleaved text and images. Please answer the question based on them. {how} "
            f"{ANSWER}\n\n{numbered(text)}",
            answers=answers,
            images=self._pictures(names),
            choices=letters_for(choices) if choices else (),
        )

    def _icl(self, row: Row) -> Example:
        seed = int.from_bytes(hashlib.sha256(row["id"].encode()).digest()[:4], "big")
        order = np.random.default_rng(seed)
        rounds = row["exemplars"][order.integers(len(row["exemplars"]))]
        shown = [some[i] for some in rounds for i in order.permutation(len(some))]
        gold = row["test"]["answer"]
        lines = "\n".join(f"Picture {i}: label: {item['id']}" for i, item in enumerate(shown, 1))
        return Example(
            id=self.record_id(row),
            question="You need to recognize entities in images. Use the provided mapping from the image to label to "
            f'assign a label to the test image. Only output "label: {{label}}" and nothing else.\n\n{lines}\n\n'
            f"Now classify picture {len(shown) + 1}.",
            answers=(f"label: {gold}",),
            images=self._pictures([*(item["image"] for item in shown), row["test"]["image"]]),
            evidence=tuple(Page(i) for i, item in enumerate(shown) if item["id"] == gold),
            meta={"label": int(gold)},
        )

    # ------------------------------------------------------------------ answers
    def score(self, said: str, example: Example) -> float:
        part = answer_part(said)
        if self.kind == "docqa":
            return docqa_score(part, example.answers[0], example.meta["answer_format"])
        if self.kind == "icl":
            return float(_label(said) == example.meta["label"])
        if self.kind == "vh":
            return float(last_yes_no(part) == example.answer)
        if example.choices:
            return float(choice_letter(part, dict.fromkeys(example.choices, "")) == example.answer)
        if self.subset.startswith("counting"):
            return float(_count(part) == _count(example.answers[0]))
        return float(contains(part, example.answers))

    def well_formed(self, said: str, example: Example) -> bool:
        part = answer_part(said)
        if self.kind == "icl":
            return _label(said) is not None
        if self.kind == "vh":
            return last_yes_no(part) is not None
        if example.choices:
            return choice_letter(part, dict.fromkeys(example.choices, "")) is not None
        return bool(numbers(part)) if self.subset.startswith("counting") else bool(part)


def _page_of(name: str) -> tuple[tuple[str, ...], int]:
    """(names of the document, page from 0) of a page's file.

    `manual_x/manual_x_page2.jpg` counts from 0, SlideVQA's `deck/deck-name-4-1024.jpg` from 1.
    """
    path = Path(name)
    folder = (path.parent.name,) if path.parent.name else ()
    zero, one = re.fullmatch(r"(.+)_page(\d+)", path.stem), re.fullmatch(r"(.+)-(\d+)-1024", path.stem)
    if zero:
        return (zero[1], *folder), int(zero[2])
    if one:
        return (*folder, one[1]), int(one[2]) - 1
    raise Fault(f"the page name {name!r} has no page number")


def numbered(text: str) -> str:
    """Every mark of a picture replaced by its number, from 1: the prompt shows all pictures before the text."""
    pieces = text.split(MARK)
    return pieces[0] + "".join(f"[picture {i}]{piece}" for i, piece in enumerate(pieces[1:], 1))


def _count(text: str) -> int | None:
    """The sum of the last list of numbers in a text, or of all its numbers (MMLongBench's `soft_acc`)."""
    lists = re.findall(r"\[[\d\s,]+\]", text)
    found = re.findall(r"\d+", lists[-1] if lists else text)
    return sum(map(int, found)) if found else None


def _label(text: str) -> int | None:
    """The number after "label:", else the last one (MMLongBench's `extract_class_num`)."""
    named, found = re.search(r"label:\s*(\d+)", text, re.IGNORECASE), re.findall(r"\b\d+\b", text)
    return int(named[1]) if named else int(found[-1]) if found else None
