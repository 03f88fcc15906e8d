"""Readers of yes-no questions and choices: the published layouts, and each trap of the formats by name."""

import pytest
from tasks import fixtures as fx
from tasks.reading import every, halves_share_nothing, one, whys

from mmlens.errors import DataError, OptionError
from mmlens.model.pictures import load_picture
from mmlens.tasks import load_task


# ---------------------------------------------------------------------- HallusionBench
def hallusion(root):
    rows = [
        fx.hallusion_row(),
        fx.hallusion_row(question="1", answer="0"),
        fx.hallusion_row(figure="1", answer="0", filename="./hallusion_bench/VD/a/0_1.png"),
        fx.hallusion_row("VS", filename=None, visual_input="0"),
        fx.hallusion_row("VS", figure="1", filename="./hallusion_bench/VS/a/0_1.png"),
    ]
    for row in rows:
        if row["filename"]:
            fx.picture(root / row["filename"])
    fx.write_json(root / "HallusionBench.json", rows)
    return root


def test_hallusionbench_asks_some_questions_without_picture(tmp_path):
    task = load_task("hallusionbench", hallusion(tmp_path))
    found = every(task)
    assert [len(e.images) for e in found.values()].count(0) == 1 and found["VS_a_0_0_0"].images == ()
    assert set(every(load_task("hallusionbench", tmp_path, subset="non_image"))) == {"VS_a_0_0_0"}
    assert len(every(load_task("hallusionbench", tmp_path, subset="image"))) == 4
    assert found["VD_a_0_0_1"].answers == ("no",) and found["VD_a_0_0_0"].answers == ("yes",)


def test_hallusionbench_halves_share_no_set_of_figures(tmp_path):
    rows = [fx.hallusion_row(figure=f, set_id=str(s), filename=None) for s in range(8) for f in "01"]
    fx.write_json(tmp_path / "HallusionBench.json", rows)
    halves_share_nothing(load_task("hallusionbench", tmp_path), lambda e: e.meta["set_id"])


def test_hallusionbench_summary_is_its_authors(tmp_path):
    task = load_task("hallusionbench", hallusion(tmp_path))
    names = ["VD_a_0_0_0", "VD_a_0_0_1", "VD_a_0_1_0", "VS_a_0_0_0", "VS_a_0_1_0"]
    examples = [every(task)[n] for n in names]
    said = ["Yes", "No", "Yes", "I cannot tell", "It is not sure"]
    # right: yes, yes, no, yes (unsure without picture), no (unsure with one)
    assert [task.score(s, e) for s, e in zip(said, examples)] == [1, 1, 0, 1, 0]
    found = task.summary(examples, said)
    # figures VD/0 (both right), VD/1, VS/1; VS/0 is no figure. Pairs VD/0 (figures 0 and 1), VD/1, VS/0
    assert found == {"aAcc": 0.6, "fAcc": pytest.approx(1 / 3), "qAcc": pytest.approx(1 / 3)}
    assert task.well_formed("I cannot tell", examples[0]) and not task.well_formed("a circle", examples[0])


# ---------------------------------------------------------------------- MMMU
def mmmu(root, *rows):
    fx.write_parquet(root / "Art" / "validation-00000-of-00001.parquet", list(rows))
    return root


def test_mmmu_pictures_come_in_the_order_of_their_marks(tmp_path):
    task = load_task("mmmu", mmmu(tmp_path, fx.mmmu_row()))
    example = one(task)
    assert [load_picture(p).getpixel((0, 0))[0] for p in example.images] == [2, 1, 3]
    assert example.question.startswith(
        "Look at <image 1>, then at <image 2>: which is red?\nA. the first\nB. <image 3>\n"
    )
    assert example.meta["options"] == ("the first", "<image 3>", "neither's")  # a literal list in a string
    assert example.choices == ("A", "B", "C") and task.score("(B)", example) == 1.0
    assert task.score("no idea", example) == 0.0 and not task.well_formed("no idea", example)


def test_mmmu_open_questions_and_faults(tmp_path):
    rows = [
        fx.mmmu_row(1, question_type="open", options="[]", answer="['$6', '6']", question="How much is <image 1>?"),
        fx.mmmu_row(2, answer="?"),
        fx.mmmu_row(3, image_2=None),
        fx.mmmu_row(4, question="Which?", options="['a', 'b']"),
        fx.mmmu_row(5, options="oh"),
    ]
    task = load_task("mmmu", mmmu(tmp_path, *rows))
    example = one(task)
    assert example.answers == ("$6", "6") and example.choices == () and len(example.images) == 1
    assert task.score("The answer is 6.", example) == 1.0 and task.score("7", example) == 0.0
    assert list(task.check().faults) == [f"validation_Art_{n}" for n in (2, 3, 4, 5)]
    with pytest.raises(DataError, match="0 usable"):
        load_task("mmmu", tmp_path, subject="Music").examples("rank", 1)
    with pytest.raises(OptionError, match="without subject="):
        load_task("mmmu", "hub:MMMU/MMMU")


# ---------------------------------------------------------------------- 3DSRBench
def test_3dsrbench_circular_counts_a_question_once(tmp_path):
    ids = ["AB12CD34", "AB12CD34-1", "AB12CD34-flip", "AB12CD34-flip-1"]
    rows = [fx.tsv_row(i, qid, answer="AB"[i % 2]) for i, qid in enumerate(ids, 1)]
    fx.write_tsv(tmp_path / "3dsrbench_v1_vlmevalkit_circular.tsv", rows)
    task = load_task("3dsrbench", tmp_path)
    examples = [every(task)[i] for i in ids]
    assert examples[0].choices == ("A", "B") and examples[0].question.startswith('Which is "higher"?\nA. the lamp\n')
    said = ["B", "A", "B", "B"]  # the last is wrong
    assert task.summary(examples, said) == {"flip": 0.5, "circular": 0.5, "flip_circular": 0.0}
    assert task.summary(examples, ["B", "A"] * 2)["flip_circular"] == 1.0


def test_3dsrbench_rows_may_point_to_another_rows_picture(tmp_path):
    rows = [fx.tsv_row(1, "AAAAAAAA"), fx.tsv_row(2, "BBBBBBBB", image="1"), fx.tsv_row(3, "CCCCCCCC", image="!")]
    fx.write_tsv(tmp_path / "3dsrbench_circular.tsv", rows)
    task = load_task("3dsrbench", tmp_path)
    found = every(task)
    assert found["AAAAAAAA"].images == found["BBBBBBBB"].images and whys(task) == ["a picture that is no base64"]
    assert task.group(rows[0]) == task.group(rows[1]) != task.group(rows[2])


def test_3dsrbench_parquet_with_links_reads_the_pictures_beside_it(tmp_path):
    rows = [
        {**fx.tsv_row(i, f"Q{i}"), "image_url": f"http://images.cocodataset.org/val2017/{i // 2}.png"} for i in range(8)
    ]
    for row in rows:
        del row["image"]
    for i in range(4):
        fx.picture(tmp_path / "coco_images" / f"{i}.png")
    fx.write_parquet(tmp_path / "test.parquet", rows)
    task = load_task("3dsrbench", tmp_path, subset="plain")
    assert len(every(task)) == 8
    halves_share_nothing(task, lambda e: e.images[0])
