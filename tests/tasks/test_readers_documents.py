"""Readers of documents and long contexts: the published layouts, and each trap of the formats by name."""

import re

import numpy as np
import pytest
from tasks import fixtures as fx
from tasks.reading import every, one, whys

from mmlens.errors import DataError, OptionError
from mmlens.evidence.regions import Box, Page, PageRegion
from mmlens.model.pictures import load_picture
from mmlens.tasks import load_task


# ---------------------------------------------------------------------- MMLongBench-Doc
def test_mmlongbench_doc_pages_count_from_one(tmp_path):
    example = one(load_task("mmlongbench-doc", fx.mmlongbench_doc(tmp_path, [fx.doc_row()])))
    assert example.evidence == (Page(2),) and example.pages[2].name == "3.png" and len(example.pages) == 5
    assert example.meta["sources"] == ("Figure",)


def test_mmlongbench_doc_pages_sort_by_number_and_limits_keep_the_evidence(tmp_path):
    fx.mmlongbench_doc(tmp_path, [fx.doc_row(evidence_pages="[10]")], pages=11)
    example = one(load_task("mmlongbench-doc", tmp_path, max_pages=3))
    assert [p.name for p in example.pages] == ["1.png", "2.png", "10.png"] and example.evidence == (Page(2),)
    assert example.meta["document_pages"] == (1, 2, 10)
    with pytest.raises(OptionError, match="max_pages=0"):
        load_task("mmlongbench-doc", tmp_path, max_pages=0)


def test_mmlongbench_doc_unanswerable_questions_have_no_evidence(tmp_path):
    row = fx.doc_row(answer="Not answerable", answer_format="None", evidence_pages="[]", evidence_sources="[]")
    task = load_task("mmlongbench-doc", fx.mmlongbench_doc(tmp_path, [row]))
    example = one(task)
    assert example.evidence == () and example.answers == ("Not answerable",)
    assert task.score("Not answerable", example) == 1.0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"evidence_pages": "[6]"}, "page 5 \\(from 0\\) of 5"),
        ({"evidence_pages": "[0]"}, "page -1"),
        ({"evidence_pages": "__import__('os')"}, "is no list"),
        ({"answer_format": "Set"}, "the answer format 'Set'"),
        ({"doc_id": "../etc.pdf"}, "a document named"),
        ({"doc_id": "other.pdf"}, "pages/other has no page pictures"),
    ],
)
def test_mmlongbench_doc_faults(tmp_path, change, why):
    fx.mmlongbench_doc(tmp_path, [fx.doc_row(**change)])
    (found,) = whys(load_task("mmlongbench-doc", tmp_path))
    assert re.search(why, found), found


def test_mmlongbench_doc_missing_pages_and_parquet(tmp_path):
    fx.mmlongbench_doc(tmp_path, [fx.doc_row()])
    fx.write_parquet(tmp_path / "data" / "train-0.parquet", [fx.doc_row(answer="6", answer_format="Int")])
    task = load_task("mmlongbench-doc", tmp_path)
    assert task.score("6", one(task)) == 1.0 and task.score("7", one(task)) == 0.0
    (tmp_path / "pages/leaflet/2.png").unlink()
    assert whys(task) == ["page 2 of pages/leaflet is missing"]


# ---------------------------------------------------------------------- MMDocIR
def test_mmdocir_boxes_are_points_and_pages_count_from_zero_within_the_document(tmp_path):
    example = one(load_task("mmdocir", fx.mmdocir(tmp_path, [fx.docir_question()])))
    (place,) = example.evidence
    assert isinstance(place, PageRegion) and place.number == 2 and len(example.pages) == 5
    assert place.region.in_pixels(612, 792) == Box.from_xyxy(60, 100, 300, 260)
    # the JPEG has 120 x 80 pixels: each axis has its own scale
    assert place.region.in_pixels(120, 80).corners == pytest.approx(
        (60 * 120 / 612, 100 * 80 / 792, 58.82353, 26.26263)
    )


def test_mmdocir_page_indices_are_inclusive_rows_of_the_pages_file(tmp_path):
    fx.mmdocir(tmp_path, [fx.docir_question(page=4)], before=2, pages=5)
    example = one(load_task("mmdocir", tmp_path))
    assert len(example.pages) == 5 and example.evidence[0].number == 4
    reds = [round(np.asarray(load_picture(p))[..., 0].mean() / 20) for p in example.pages]
    assert reds == [0, 1, 2, 3, 4]


def test_mmdocir_without_boxes_the_evidence_is_pages(tmp_path):
    fx.mmdocir(tmp_path, [fx.docir_question(layout_mapping=[], page_id=[1, 3])])
    assert one(load_task("mmdocir", tmp_path)).evidence == (Page(1), Page(3))
    assert one(load_task("mmdocir", tmp_path, max_pages=3)).evidence == (Page(1), Page(2))


def test_mmdocir_clamps_a_box_that_leaves_the_page_a_little(tmp_path):
    fx.mmdocir(tmp_path, [fx.docir_question(bbox=[-3, 100, 615, 260.5])])
    (place,) = one(load_task("mmdocir", tmp_path)).evidence
    assert place.region.corners == (0, 100, 612, 260.5)


@pytest.mark.parametrize(
    ("question", "why"),
    [
        (fx.docir_question(bbox=[60, 100, 900, 260]), "leaves its page"),
        (fx.docir_question(bbox=[60, 100, 60, 260]), "has no area"),
        (fx.docir_question(page=182), "page 182 \\(from 0\\) of 5"),
        (fx.docir_question(page_id=[5]), "page 5 \\(from 0\\) of 5"),
    ],
)
def test_mmdocir_faults(tmp_path, question, why):
    fx.mmdocir(tmp_path, [question])
    (found,) = whys(load_task("mmdocir", tmp_path))
    assert re.search(why, found), found


def test_mmdocir_notices_pages_of_another_document(tmp_path):
    fx.mmdocir(tmp_path, [fx.docir_question()], last=7)
    assert whys(load_task("mmdocir", tmp_path)) == ["row 7 of the pages is of 'last.pdf', not of 'leaflet.pdf'"]


def test_mmdocir_scores_by_likeness(tmp_path):
    task = load_task("mmdocir", fx.mmdocir(tmp_path, [fx.docir_question()]))
    assert task.score("The green!", one(task)) == 1.0 and task.score("blue", one(task)) == 0.0


# ---------------------------------------------------------------------- MMLongBench
def docqa_row(pages=(2, 3, 7), answers=(3,), **more):
    row = {
        "id": "docqa_3", "doc_name": "manual_x", "page_list": [f"img/manual_x/manual_x_page{n}.jpg" for n in pages],
        "ans_page_list": list(answers), "question": "How many bolts?", "answer": "6", "answer_format": "Int",
    }  # fmt: skip
    return {**row, **more}


def test_mmlongbench_evidence_pages_are_matched_by_file_name(tmp_path):
    task = load_task("mmlongbench", fx.docqa(tmp_path, [docqa_row()]))
    example = one(task)
    assert example.evidence == (Page(1),) and len(example.pages) == 3  # page 3 of the document, the second shown
    assert task.score("Answer: There are 6", example) == 1.0 and task.score("Answer: 7", example) == 0.0


def test_mmlongbench_padding_pages_of_another_document_do_not_count(tmp_path):
    row = docqa_row()
    row["page_list"] = ["img/other/other_page3.jpg", *row["page_list"]]
    assert one(load_task("mmlongbench", fx.docqa(tmp_path, [row]))).evidence == (Page(2),)


def test_mmlongbench_slidevqa_file_names_count_from_one(tmp_path):
    row = docqa_row(doc_name="deck_1", page_list=[f"img/deck_1/what-clients-want-{n}-1024.jpg" for n in (3, 4, 5)])
    fx.docqa(tmp_path, [row], "slidevqa_K8")
    assert one(load_task("mmlongbench", tmp_path, subset="slidevqa")).evidence == (Page(1),)


def test_mmlongbench_cut_evidence_and_names_without_number_are_faults(tmp_path):
    fx.docqa(tmp_path, [docqa_row(answers=(4,)), docqa_row(id="b", page_list=["img/manual_x/cover.jpg"])])
    found = whys(load_task("mmlongbench", tmp_path))
    assert found[0] == "page 4 (from 0) of manual_x is not among the pages shown" and "has no page number" in found[1]


def test_mmlongbench_answers_of_another_format_are_faults(tmp_path):
    fx.docqa(tmp_path, [docqa_row(answer="six"), docqa_row(id="b", answer="six", answer_format="List")])
    found = whys(load_task("mmlongbench", tmp_path))
    assert len(found) == 2 and all("another form than expected" in why for why in found)


def test_mmlongbench_lengths_and_summaries(tmp_path):
    fx.docqa(tmp_path, [docqa_row()], "mmlongdoc_K128")
    assert len(every(load_task("mmlongbench", tmp_path, length="K128"))) == 1
    with pytest.raises(DataError, match="mmlongdoc_K8"):
        load_task("mmlongbench", tmp_path)
    with pytest.raises(OptionError, match="summaries have no short answer"):
        load_task("mmlongbench", tmp_path, subset="summ")
    with pytest.raises(OptionError, match="length='K9'"):
        load_task("mmlongbench", tmp_path, length="K9")


def niah(root, name, row, pictures):
    for i, path in enumerate(pictures):
        fx.picture(root / "mmlb_image" / path, 20, 20, (i, 0, 0))
    fx.write_lines(root / "mmlb_data" / "NIAH" / name, [row])
    return root


def test_mmlongbench_choice_pictures_come_last_and_pair_with_their_marks(tmp_path):
    row = {
        "id": "r1", "question": "Which is in the text?", "answer": 1, "ctxs": [{"text": "a<image>b"}, {"text": "<image>"}],
        "image_list": ["h/1.jpg", "h/2.jpg"], "choices_image": ["c/a.jpg", "c/b.jpg"],
    }  # fmt: skip
    niah(tmp_path, "retrieval-image_test_K8_dep6.jsonl", row, [*row["image_list"], *row["choices_image"]])
    task = load_task("mmlongbench", tmp_path, subset="retrieval-image")
    example = one(task)
    assert [p.name for p in example.images] == ["1.jpg", "2.jpg", "a.jpg", "b.jpg"]
    assert "a[picture 1]b" in example.question and example.question.endswith("\nA. [picture 3]\nB. [picture 4]")
    assert example.answers == ("B",) and "<image>" not in example.question
    assert task.score("Answer: B", example) == 1.0 and task.score("Answer: A or B", example) == 0.0


def test_mmlongbench_counted_needles_and_marks_without_pictures(tmp_path):
    row = {
        "id": "c1", "question": "How many <image>?", "answer": [1, 2], "ctxs": [{"text": "x<image>"}],
        "image_list": ["h/1.jpg"], "needle_image_list": ["n/1.jpg"],
    }  # fmt: skip
    niah(tmp_path, "counting-image_test_K8_dep3.jsonl", row, ["h/1.jpg", "n/1.jpg"])
    task = load_task("mmlongbench", tmp_path, subset="counting-image")
    example = one(task)
    assert example.images[1].parent.name == "n" and example.question.endswith("How many [picture 2]?")
    assert task.score("[2, 1]", example) == 1.0 and task.score("[1, 1]", example) == 0.0  # the sum counts
    niah(tmp_path, "counting-image_test_K8_dep3.jsonl", {**row, "needle_image_list": []}, [])
    assert whys(load_task("mmlongbench", tmp_path, subset="counting-image")) == ["2 marks for 1 pictures"]


def test_mmlongbench_retrieved_texts_haystacks_and_examples(tmp_path):
    fx.picture(tmp_path / "mmlb_image" / "e/1.jpg")
    fx.picture(tmp_path / "mmlb_image" / "e/2.jpg")
    texts = [{"title": "T", "text": "words", "doc_id": 1}]
    rag = {"id": "v", "image": "e/1.jpg", "question": "Who?", "answer": ["Ada"], "ctxs": texts, "positive_ctxs": texts}
    fx.write_lines(tmp_path / "mmlb_data/vrag/infoseek_K8_dep3.jsonl", [rag])
    task = load_task("mmlongbench", tmp_path, subset="infoseek")
    assert task.score("Answer: it was Ada L.", one(task)) == 1.0 and "Document (Title: T): words" in one(task).question
    hay = {"id": "h", "question": "Is there a dog?", "answer": "Yes", "ctxs": ["e/1.jpg", "e/2.jpg"]}
    fx.write_lines(tmp_path / "mmlb_data/NIAH/vh_single_test_1000_K8_dep6.jsonl", [hay])
    task = load_task("mmlongbench", tmp_path, subset="vh_single")
    assert one(task).answers == ("yes",) and len(one(task).images) == 2 and task.score("Answer: Yes", one(task)) == 1.0
    shots = [[{"image": "e/1.jpg", "id": 3}, {"image": "e/2.jpg", "id": 5}]]
    cars = {"cars": {"exemplar_list": [shots], "test_example": [{"image": "e/2.jpg", "answer": 5}]}}
    fx.write_json(tmp_path / "mmlb_data/ICL/cars196_K8.json", cars)
    task = load_task("mmlongbench", tmp_path, subset="cars196")
    example = one(task)
    (page,) = example.evidence
    assert example.images[page.number].name == "2.jpg" and page.number < 2 and len(example.images) == 3
    assert f"Picture {page.number + 1}: label: 5" in example.question
    assert task.score("label: 5", example) == 1.0 and task.score("label: 3", example) == 0.0
