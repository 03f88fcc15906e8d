"""Rows, folders, archives and pickles that nothing leaves; halves, orders and faults of data tasks."""

import gzip
import io
import os
import pickle
import struct
import tarfile
import zipfile

import datasets
import pytest
from PIL import Image
from tasks import fixtures as fx

from mmlens.errors import DataError, OptionError
from mmlens.tasks import load_task
from mmlens.tasks.archives import extract
from mmlens.tasks.reading import shown_pages, subject_in
from mmlens.tasks.rows import Each, Fault, Folder, JsonLines, Parquet, Records, Tsv
from mmlens.tasks.unpickle import load_plain


# ---------------------------------------------------------------------- pickles
class Evil:
    def __reduce__(self):
        return os.system, ("touch " + Evil.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_runs_nothing(tmp_path, protocol):
    Evil.path = str(tmp_path / "ran")
    (tmp_path / "refs.p").write_bytes(pickle.dumps([{"ref_id": 1}, Evil()], protocol))
    with pytest.raises(DataError, match="plain data"):
        load_plain(tmp_path / "refs.p")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",  # GLOBAL, REDUCE
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",  # STACK_GLOBAL
        b"(S'echo'\nios\nsystem\n.",  # INST
        b"Pname\n.",  # PERSID
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x05\x97.",  # NEXT_BUFFER
        b"\x80\x05\x96" + struct.pack("<Q", 3) + b"abc.",  # BYTEARRAY8, harmless but not plain
        b"\x80\x02}b.",
        b"\x80\x02]",
        b"no pickle",
        b"",
        b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.",  # a length beyond the file
    ],
)
def test_other_opcodes_and_broken_pickles_are_refused(tmp_path, data):
    (tmp_path / "refs.p").write_bytes(data)
    with pytest.raises(DataError):
        load_plain(tmp_path / "refs.p")


def test_a_high_memo_number_allocates_nothing(tmp_path):
    (tmp_path / "refs.p").write_bytes(b"\x80\x02]r\xff\xff\xff\xff.")  # the C unpickler would fill 2**32 places
    assert load_plain(tmp_path / "refs.p") == []


def test_python_2_strings_become_latin_1_text(tmp_path):
    value = [
        {b"sent": b"caf\xe9", b"n": 300, b"x": 1.5, b"none": None, b"yes": True, "uni": "\u20ac", b"long": b"y" * 300}
    ]
    (tmp_path / "p2").write_bytes(fx.python2_pickle(value))
    (tmp_path / "p0").write_bytes(fx.python2_text_pickle([{b"sent": b"cafe", b"n": 300, b"x": 1.5, b"none": None}]))
    expected = {"sent": "café", "n": 300, "x": 1.5, "none": None, "yes": True, "uni": "€", "long": "y" * 300}
    assert load_plain(tmp_path / "p2") == [expected]
    assert load_plain(tmp_path / "p0") == [{"sent": "cafe", "n": 300, "x": 1.5, "none": None}]


def test_a_file_beyond_the_limit_is_not_opened(tmp_path):
    with (tmp_path / "refs.p").open("wb") as file:
        file.truncate(2 * 2**30 + 1)  # sparse
    with pytest.raises(DataError, match="bytes"):
        load_plain(tmp_path / "refs.p")


# ---------------------------------------------------------------------- archives
def tar(path, *members, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, data, kind in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, len(data)
            info.linkname = "/etc/passwd"
            archive.addfile(info, io.BytesIO(data))
    return path


def test_a_good_archive_is_unpacked(tmp_path):
    archive = tar(tmp_path / "a.tar.gz", ("d/x.txt", b"hello", tarfile.REGTYPE))
    assert [p.read_bytes() for p in extract(archive, tmp_path / "out")] == [b"hello"]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        packed.writestr("d/y.txt", "again")
    assert (tmp_path / "out/d/y.txt") in extract(tmp_path / "a.zip", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("../out.txt", tarfile.REGTYPE),
        ("/tmp/mmlens-out.txt", tarfile.REGTYPE),
        ("link", tarfile.SYMTYPE),
        ("hard", tarfile.LNKTYPE),
        ("device", tarfile.CHRTYPE),
        ("pipe", tarfile.FIFOTYPE),
    ],
)
def test_members_that_leave_the_folder_or_are_no_files_are_refused(tmp_path, name, kind):
    archive = tar(tmp_path / "a.tar.gz", (name, b"", kind))
    with pytest.raises(DataError, match="member"):
        extract(archive, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == [] and not (tmp_path / "out.txt").exists()


def test_a_link_in_a_zip_and_one_that_is_already_there_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        info = zipfile.ZipInfo("link")
        info.external_attr = 0o120777 << 16
        packed.writestr(info, "/etc")
    with pytest.raises(DataError, match="link"):
        extract(tmp_path / "a.zip", tmp_path / "out")
    (tmp_path / "out/d").symlink_to(tmp_path)
    with pytest.raises(DataError, match="outside"):
        extract(tar(tmp_path / "b.tar.gz", ("d/x", b"1", tarfile.REGTYPE)), tmp_path / "out")
    assert not (tmp_path / "x").exists()


def test_an_archive_that_unpacks_to_far_more_than_it_holds_is_refused(tmp_path):
    info = tarfile.TarInfo("zeros")
    info.size = 201 * 2**20
    with gzip.open(tmp_path / "a.tar.gz", "wb", compresslevel=1) as packed:
        packed.write(info.tobuf())
    with pytest.raises(DataError, match="bytes unpacked"):
        extract(tmp_path / "a.tar.gz", tmp_path / "out")
    (tmp_path / "bad.zip").write_bytes(b"PK no archive")
    with pytest.raises(DataError, match="cannot be unpacked"):
        extract(tmp_path / "bad.zip", tmp_path / "out")


# ---------------------------------------------------------------------- folders and rows
@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "link.png", "", None, 3, "a\0b", "sub/../../x"])
def test_paths_that_leave_the_root_are_faults(tmp_path, name):
    outside = fx.picture(tmp_path / "secret.png")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link.png").symlink_to(outside)
    folder = Folder(root, layout="x")
    for look in (folder.inside, lambda n: folder.find(n, "*")):
        with pytest.raises(Fault):
            look(name)


def test_find_looks_in_the_named_folders(tmp_path):
    fx.picture(tmp_path / "images" / "val2014" / "a.png")
    folder = Folder(tmp_path, layout="x")
    assert folder.find("a.png", "val2014", "images/val2014").parent.name == "val2014"
    with pytest.raises(Fault, match=r"b\.png is missing"):
        folder.find("b.png", "images/val2014")


def test_json_lines_reads_by_position_and_keeps_faults_in_their_place(tmp_path):
    (tmp_path / "a.jsonl").write_bytes('{"a": "é"}\n\n{"a": 2\n[1]\n{"a": 3}'.encode())
    found = list(JsonLines(tmp_path / "a.jsonl"))
    assert [isinstance(r, Fault) for _, r in found] == [False, True, True, False]
    assert JsonLines(tmp_path / "a.jsonl").get(found[3][0]) == {"a": 3}


def test_each_gives_a_record_once_for_each_item():
    rows = Each(Records([{"a": [1, 2]}, {"a": 1}, "x"]), "a")
    found = list(rows)
    assert [(p, r["item"]) for p, r in found[:2]] == [((0, 0), 0), ((0, 1), 1)]
    assert rows.get((0, 1)) == {"a": [1, 2], "item": 1}
    assert all(isinstance(r, Fault) for _, r in found[2:])


def test_tab_separated_cells_keep_quotes_tabs_and_lines(tmp_path):
    rows = [fx.tsv_row(1, "q1", question='a "b"\tc\nd'), fx.tsv_row(2, "q2")]
    found = list(Tsv(fx.write_tsv(tmp_path / "a.tsv", rows)))
    assert [r for _, r in found] == rows
    assert Tsv(tmp_path / "a.tsv").get(found[1][0]) == rows[1]
    (tmp_path / "b.tsv").write_text("a\tb\n1\n1\t2\n")
    assert [isinstance(r, Fault) for _, r in Tsv(tmp_path / "b.tsv")] == [True, False]


def test_parquet_holds_a_row_group_at_a_time_and_outlines_read_few_columns(tmp_path, monkeypatch):
    import pyarrow.parquet as pq

    path = fx.write_parquet(tmp_path / "a.parquet", [{"id": i, "big": "x" * 100} for i in range(10)], row_group_size=4)
    rows, read = Parquet([path], columns=("id",)), []
    whole = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda s, g, **k: read.append((g, k["columns"])) or whole(s, g, **k)
    )
    first = next(iter(rows))
    assert first == ((0, 0, 0), {"id": 0, "big": "x" * 100}) and read == [(0, None)]
    assert [row for _, row in rows.outline()] == [{"id": i} for i in range(10)]
    assert read[1:] == [(0, ["id"]), (1, ["id"]), (2, ["id"])]
    assert rows.nth(5)["id"] == 5 and rows.nth(7)["id"] == 7 and rows.nth(8)["id"] == 8
    assert read[4:] == [(1, None), (2, None)]  # rows 5 and 7 are of one group, read once
    with pytest.raises(Fault, match="row 10 of 10"):
        rows.nth(10)


def test_a_file_that_is_no_parquet_is_a_data_error(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match="no parquet"):
        load_task("pope", tmp_path)


def test_pages_shown_are_those_of_the_evidence_then_the_first():
    assert shown_pages(5, {3}, None) == [0, 1, 2, 3, 4]
    assert shown_pages(5, {3}, 2) == [0, 3]
    with pytest.raises(Fault, match="page 5"):
        shown_pages(5, {5}, None)
    with pytest.raises(Fault, match="max_pages=1"):
        shown_pages(5, {1, 2}, 1)


def test_a_subject_is_a_piece_that_stands_once():
    assert subject_in("Where is the dog? Answer.", "the dog", "is ", "?") == "the dog"
    assert subject_in("Where is box? Answer with its box as", "box", "is ", "?") == "box?"
    assert subject_in("Where is a? a?", "a", "", "") is None


# ---------------------------------------------------------------------- data tasks, on POPE
def pope(root, n=40, subset="random", **more):
    rows = []
    for i in range(n):
        fx.picture(root / "val2014" / f"COCO_val2014_{i // 2:012d}.png", color=(i // 2, 0, 0))
        label = ("yes", "no")[i % 2]
        rows.append(
            {
                "question_id": i,
                "image": f"COCO_val2014_{i // 2:012d}.png",
                "text": "Is there a dog?",
                "label": label,
                **more,
            }
        )
    fx.write_lines(root / f"coco_pope_{subset}.json", rows)
    return root


def test_halves_share_no_group_and_seeds_give_orders(tmp_path):
    task = load_task("pope", pope(tmp_path))
    halves = {half: task.examples(half, task.count(half), 0) for half in ("rank", "judge")}
    shown = {half: {e.images[0].name for e in some} for half, some in halves.items()}
    assert shown["rank"] and shown["judge"] and not shown["rank"] & shown["judge"]
    assert len(halves["rank"]) + len(halves["judge"]) == 40
    again = load_task("pope", tmp_path)
    order = [e.id for e in again.examples("rank", 8, 0)]
    assert order == [e.id for e in halves["rank"][:8]]
    assert order != [e.id for e in again.examples("rank", 8, 1)]
    assert {e.id for e in again.split("rank")} == {e.id for e in halves["rank"]}
    assert again.sample(4)[0].id == order[0]


def test_faults_are_counted_by_record_and_skipped(tmp_path):
    pope(tmp_path, 10)
    (tmp_path / "val2014" / "COCO_val2014_000000000003.png").unlink()
    (tmp_path / "val2014" / "COCO_val2014_000000000004.png").write_bytes(b"no picture")
    path = tmp_path / "coco_pope_random.json"
    lines = path.read_text().splitlines()
    lines[0] = lines[0].replace('"yes"', '"maybe"')
    lines[1] = lines[1].replace("COCO_val2014_000000000000.png", "../../etc/passwd")
    lines[2] = lines[2][:20]
    lines[3] = '{"question_id": 3}'
    path.write_text("\n".join(lines))
    found = load_task("pope", tmp_path).check()
    assert found.n_usable == 2 and len(found.faults) == 8
    assert found.faults["random/0"] == "the label 'maybe', neither yes nor no"
    assert "leaves the data set's folder" in found.faults["random/1"]
    assert found.faults["random/6"] == "COCO_val2014_000000000003.png is missing"
    assert "cannot be read" in found.faults["random/8"]
    assert any("no JSON" in why for why in found.faults.values())
    assert "the record lacks 'text'" in found.faults.values() or "the record lacks 'question'" in found.faults.values()
    task = load_task("pope", tmp_path)
    with pytest.raises(DataError, match="usable examples"):
        task.examples("rank", 10)
    assert len(task.faults) >= 1


@pytest.mark.parametrize("text", ["", "{}\n", "not json\n", '[{"a": 1}]', '{"question_id": 1}\n' * 3])
def test_a_data_set_of_another_form_is_one_error_with_the_layout(tmp_path, text):
    (tmp_path / "coco_pope_random.json").write_text(text)
    with pytest.raises(DataError) as error:
        load_task("pope", tmp_path)
    assert "question_id, image, text, label" in str(error.value)


def test_missing_folders_subsets_and_options(tmp_path):
    with pytest.raises(DataError, match="no folder"):
        load_task("pope", tmp_path / "none")
    with pytest.raises(DataError, match="holds none of"):
        load_task("pope", tmp_path)
    with pytest.raises(OptionError, match="subset='easy'"):
        load_task("pope", tmp_path, subset="easy")
    with pytest.raises(OptionError, match="colour"):
        load_task("pope", tmp_path, colour="red")
    with pytest.raises(OptionError, match="batch"):
        load_task("pope", tmp_path, batch=0)


def test_scores_and_forms(tmp_path):
    task = load_task("pope", pope(tmp_path))
    example = next(e for e in task if e.answer == "no")
    assert task.score("No, there is none.", example) == 1.0 and task.score("Yes", example) == 0.0
    assert task.well_formed("No.", example) and not task.well_formed("A dog", example)
    assert example.choices == ("yes", "no") and example.question.endswith("Please answer yes or no.")
    assert task.identity() == {"name": "pope", "subset": "random", "data": tmp_path.name}


def hub_rows(n=30):
    return [
        {
            "id": str(i), "question_id": str(i), "question": "Is there a dog?", "answer": "yes", "image_source": f"COCO_{i // 3}",
            "image": fx.cell(color=(i, 0, 0)), "category": ("random", "popular")[i % 2],
        }
        for i in range(n)
    ]  # fmt: skip


def test_parquet_and_stream_give_the_same_examples(tmp_path, monkeypatch):
    path = fx.write_parquet(tmp_path / "data" / "test-0.parquet", hub_rows(), row_group_size=7)
    local = load_task("pope", tmp_path)
    assert local.check().n_usable == 15
    whole = datasets.load_dataset
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # 5 s after each shuffle

    def streamed(name, config, *, split, streaming):
        assert (name, config, split, streaming) == ("lmms-lab/POPE", None, "test", True)
        stream = whole(
            "parquet", data_files=str(path), split="train", streaming=True, cache_dir=str(tmp_path / "cache")
        )
        return stream.cast_column("image", datasets.Image())

    monkeypatch.setattr(datasets, "load_dataset", streamed)
    far = load_task("pope", "hub:lmms-lab/POPE")
    for half in ("rank", "judge"):
        mine, theirs = list(local.split(half)), list(far.split(half))
        assert mine == theirs and mine and isinstance(mine[0].images[0], bytes)
        assert len({e.id for e in far.examples(half, far.count(half), 3)}) == len(mine)
    orders = [[e.id for e in far.examples("rank", 4, seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert far.identity()["data"] == "hub:lmms-lab/POPE"


def test_an_unreachable_hub_id_is_a_data_error():
    with pytest.raises(DataError, match="cannot be opened"):
        load_task("pope", "hub:nobody/nothing")


def test_readers_without_a_hub_form_say_so():
    with pytest.raises(DataError, match="hub:MLVU/MVLU"):
        load_task("mlvu", "hub:MLVU/MVLU")


def test_a_turned_picture_is_a_fault_where_boxes_depend_on_it(tmp_path):
    from mmlens.evidence.regions import Box
    from mmlens.tasks.base import Example
    from mmlens.tasks.checks import check_pictures

    path = fx.picture(tmp_path / "a.jpg", 64, 48, orientation=6)
    box = Box.from_xyxy(1, 2, 3, 4)
    asked = dict(id="1", question="q", answers=("a",), images=(path,))
    check_pictures(Example(**asked))  # without boxes nothing depends on it
    check_pictures(Example(**asked, evidence=(box,), meta={"picture_size": (64, 48)}))
    with pytest.raises(Fault, match="EXIF"):
        check_pictures(Example(**asked, evidence=(box,)))
    with pytest.raises(Fault, match="EXIF"):
        check_pictures(Example(**asked, evidence=(box,), meta={"picture_size": (48, 64)}))
    with pytest.raises(Fault, match="64 x 48 pixels, not 10 x 10"):
        check_pictures(Example(**{**asked, "images": (Image.new("RGB", (64, 48)),)}, meta={"picture_size": (10, 10)}))
