"""Small data sets in the exact published layouts, built by hand; the numbers are invented."""

import base64
import io
import json

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from tasks.python2 import as_python2, python2_pickle, python2_text_pickle  # noqa: F401


# ---------------------------------------------------------------------- files
def picture(path, width=64, height=48, color=(200, 30, 30), orientation=None):
    """A picture file of one colour; `orientation` is EXIF's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    Image.new("RGB", (width, height), color).save(path, exif=exif)
    return path


def encoded(width=64, height=48, color=(200, 30, 30), form="PNG"):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), color).save(buffer, form)
    return buffer.getvalue()


def cell(**options):
    """A picture column's cell, as the hub's parquet files have them."""
    return {"bytes": encoded(**options), "path": None}


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path, rows, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def video(path, n=12, width=64, height=48, rate=25):
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(n):
            frame = av.VideoFrame.from_ndarray(np.full((height, width, 3), 20 * i % 255, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


# ---------------------------------------------------------------------- RefCOCOg
def instances(n=8, width=200, height=180):
    """`n` pictures, each with a dog (the asked one), a chair, a crowd and a broken annotation."""
    found = {"images": [], "annotations": [], "categories": [{"id": 18, "name": "dog"}, {"id": 62, "name": "chair"}]}
    for i in range(n):
        image = 42 + i
        name = f"COCO_train2014_{image:012d}.jpg"
        found["images"].append({"id": image, "file_name": name, "width": width, "height": height})
        base = {"image_id": image, "iscrowd": 0, "area": 1.0}
        ring = [100.5, 40, 180.75, 40, 180.75, 160]
        found["annotations"] += [
            {
                **base,
                "id": 500 + 10 * i,
                "category_id": 18,
                "bbox": [100.5, 40.0, 80.25, 120.0],
                "segmentation": [ring],
            },
            {**base, "id": 501 + 10 * i, "category_id": 62, "bbox": [10, 10, 30, 40], "segmentation": [[1, 2, 3, 4]]},
            {
                **base,
                "id": 502 + 10 * i,
                "category_id": 62,
                "bbox": [0, 0, 190, 170],
                "iscrowd": 1,
                "segmentation": {"counts": [0, 100, width * height - 100], "size": [height, width]},
            },
            {**base, "id": 503 + 10 * i, "category_id": 62, "bbox": [5, 5, 0, 9], "segmentation": []},
        ]
    return found


def refs(n=8, split="val"):
    return [
        {
            "ref_id": 7 + i,
            "ann_id": 500 + 10 * i,
            "category_id": 18,
            "image_id": 42 + i,
            "file_name": f"COCO_train2014_{42 + i:012d}_{500 + 10 * i}.jpg",
            "split": split,
            "sent_ids": [70 + 2 * i, 71 + 2 * i],
            "sentences": [
                {"sent_id": 70 + 2 * i, "sent": "grey dog by the door", "raw": "Grey dog", "tokens": ["grey", "dog"]},
                {"sent_id": 71 + 2 * i, "sent": "box", "raw": "box", "tokens": ["box"]},
            ],
        }
        for i in range(n)
    ]


def refcocog(root, n=8, *, more=(), pickled=python2_pickle):
    found = instances(n)
    for image in found["images"]:
        picture(root / "images" / "train2014" / image["file_name"], image["width"], image["height"])
    write_json(root / "refcocog" / "instances.json", found)
    (root / "refcocog" / "refs(umd).p").write_bytes(pickled(as_python2([*refs(n), *refs(1, "test"), *more])))
    return root


def refcocog_shipped(root, n=6):
    """lmms-lab/RefCOCOg: one question for all, expressions as answers, boxes as x, y, width, height."""
    rows = [
        {
            "question_id": str(500 + i),
            "image": cell(width=200, height=180, color=(i, 0, 0)),
            "question": "Provide a short description for this region.",
            "answer": ["grey dog", "dog at the door"],
            "segmentation": [100.5, 40.0, 180.75, 40.0, 180.75, 160.0],
            "bbox": [100.5, 40.0, 80.25, 120.0],
            "iscrowd": 0,
            "file_name": f"COCO_train2014_{i:012d}.jpg",
        }
        for i in range(n)
    ]
    return write_parquet(root / "data" / "val-00000-of-00001.parquet", rows)


def refcocog_copied(root, orders=("xywh", "xyxy", "neither")):
    """jxu124/refcocog: no pictures; the order of `bbox` differs here from record to record."""
    boxes = {"xywh": [100.5, 40.0, 80.25, 120.0], "xyxy": [100.5, 40.0, 180.75, 160.0], "neither": [1.0, 2.0, 3.0, 4.0]}
    found, rows = instances(len(orders)), []
    for i, order in enumerate(orders):
        image = found["images"][i]
        picture(root / "train2014" / image["file_name"], image["width"], image["height"])
        rows.append(
            {
                **{k: v for k, v in refs(len(orders))[i].items() if k != "split"},
                "split": "val",
                "raw_anns": json.dumps(found["annotations"][4 * i]),
                "raw_image_info": json.dumps(image),
                "raw_sentences": "[]",
                "image_path": f"coco/train2014/{image['file_name']}",
                "bbox": boxes[order],
            }
        )
    return write_parquet(root / "data" / "validation-00000-of-00001.parquet", rows)


# ---------------------------------------------------------------------- VidSTG
def vidstg_record(vid="9001", frames=12, **more):
    record = {
        "vid": vid,
        "frame_count": frames,
        "fps": 25.0,
        "width": 64,
        "height": 48,
        "subject/objects": [{"tid": 0, "category": "adult"}, {"tid": 1, "category": "ball/sports_ball"}],
        "used_segment": {"begin_fid": 2, "end_fid": frames - 1},
        "used_relation": {"subject_tid": 0, "object_tid": 1, "predicate": "hold", "begin_fid": 4, "end_fid": 9},
        "temporal_gt": {"begin_fid": 4, "end_fid": 9},
        "captions": [{"description": "an adult lifts a ball", "type": "person", "target_id": 0}],
        "questions": [{"description": "what does the adult lift?", "type": "object", "target_id": 1}],
    }
    return {**record, **more}


def trajectories(frames=12, begin=4, end=9):
    """Boxes in frames [begin, end) only; the ball moves one pixel a frame."""
    adult = {"xmin": 1, "ymin": 2, "xmax": 21, "ymax": 40}
    return [
        [
            {"tid": 0, "bbox": adult, "generated": 0, "tracker": "none"},
            {
                "tid": 1,
                "bbox": {"xmin": f, "ymin": 5, "xmax": f + 10, "ymax": 20},
                "generated": 1,
                "tracker": "linear",
            },
        ]
        if begin <= f < end
        else []
        for f in range(frames)
    ]


def vidstg(root, vids=("9001",), records=None, frames=12, shown=None, moves=None):
    for vid in vids:
        video(root / "videos" / "0001" / f"{vid}.mp4", frames if shown is None else shown)
        annotation = {
            "version": "VERSION 1.0",
            "video_id": vid,
            "video_path": f"0001/{vid}.mp4",
            "frame_count": frames,
            "fps": 25.0,
            "width": 64,
            "height": 48,
            "subject/objects": [],
            "trajectories": moves or trajectories(frames),
            "relation_instances": [],
        }
        write_json(root / "vidor" / "training" / "0001" / f"{vid}.json", annotation)
    records = [vidstg_record(vid, frames) for vid in vids] if records is None else records
    write_json(root / "annotations" / "val_annotations.json", records)
    write_json(root / "annotations" / "val_files.json", list(vids))
    return root


# ---------------------------------------------------------------------- documents
def mmlongbench_doc(root, rows, pages=5, stem="leaflet"):
    for n in range(1, pages + 1):
        picture(root / "pages" / stem / f"{n}.png", 60, 80, (n, 0, 0))
    write_json(root / "data" / "samples.json", rows)
    return root


def doc_row(**more):
    row = {
        "doc_id": "leaflet.pdf",
        "doc_type": "Brochure",
        "question": "Which colour is the map?",
        "answer": "green",
        "evidence_pages": "[3]",
        "evidence_sources": "['Figure']",
        "answer_format": "Str",
    }
    return {**row, **more}


def mmdocir(root, questions, *, before=2, pages=5, name="leaflet.pdf", row_group_size=3, last=None):
    """A document whose pages are rows `before` to `before + pages - 1` of the pages file, between two others'."""

    def page(doc, n):
        return {
            "doc_name": doc,
            "domain": "Brochure",
            "passage_id": str(n),
            "image_path": f"page_images/{doc}_{n}.jpg",
            "image_binary": encoded(width=120, height=80, color=(n * 20, 0, 0), form="JPEG"),
            "ocr_text": "",
            "vlm_text": "",
        }

    rows = [page("other.pdf", n) for n in range(before)] + [page(name, n) for n in range(pages)] + [page("last.pdf", 0)]
    write_parquet(root / "MMDocIR_pages.parquet", rows, row_group_size=row_group_size)
    document = {
        "doc_name": name,
        "domain": "Brochure",
        "page_indices": [before, before + pages - 1 if last is None else last],
        "layout_indices": [200, 260],
        "questions": questions,
    }
    write_lines(root / "MMDocIR_annotations.jsonl", [document])
    return root


def docir_question(bbox=(60, 100, 300, 260), page=2, size=(612.0, 792.0), **more):
    layouts = [{"page": page, "page_size": list(size), "bbox": list(bbox)}]
    return {
        "Q": "Which colour is the map?",
        "A": "green",
        "type": "['Figure']",
        "page_id": [page],
        "layout_mapping": layouts,
        **more,
    }


def docqa(root, rows, name="mmlongdoc_K8"):
    for row in rows:
        for i, path in enumerate(row["page_list"]):
            if not (root / "mmlb_image" / path).exists():
                picture(root / "mmlb_image" / path, 60, 80, (i, 0, 0))
    write_lines(root / "mmlb_data" / "documentQA" / f"{name}.jsonl", rows)
    return root


# ---------------------------------------------------------------------- others
def hallusion_row(
    category="VD", figure="0", question="0", answer="1", filename="./hallusion_bench/VD/a/0_0.png", **more
):
    row = {
        "category": category,
        "subcategory": "a",
        "visual_input": "0" if filename is None else "1",
        "set_id": "0",
        "figure_id": figure,
        "sample_note": "circle",
        "question_id": question,
        "question": "Is the right circle larger?",
        "gt_answer_details": "It is.",
        "gt_answer": answer,
        "filename": filename,
    }
    return {**row, **more}


def mmmu_row(n=1, **more):
    row = {
        "id": f"validation_Art_{n}",
        "question": "Look at <image 2>, then at <image 1>: which is red?",
        "options": "['the first', '<image 3>', \"neither's\"]",
        "explanation": "",
        **{f"image_{k}": cell(color=(k, n, 0)) if k < 4 else None for k in range(1, 8)},
        "img_type": "['Paintings']",
        "answer": "B",
        "topic_difficulty": "Easy",
        "question_type": "multiple-choice",
        "subfield": "Drawing",
    }
    return {**row, **more}


def tsv_row(index, qid, image=None, **more):
    row = {
        "index": str(index),
        "qid": qid,
        "question": 'Which is "higher"?',
        "A": "the lamp",
        "B": "the chair",
        "C": "",
        "D": "",
        "answer": "A",
        "category": "height_higher",
        "image": base64.b64encode(encoded(color=(index, 0, 0))).decode() if image is None else image,
    }
    return {**row, **more}


def write_tsv(path, rows):
    def quoted(text):
        return '"' + text.replace('"', '""') + '"' if any(c in text for c in '"\t\n') else text

    lines = ["\t".join(rows[0])] + ["\t".join(map(quoted, row.values())) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path
