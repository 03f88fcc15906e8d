"""VidSTG (Zhang et al. 2020) on VidOR (Shang et al. 2019): which thing does something, and where it is meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from mmlens.errors import DataError
from mmlens.evidence.regions import Box, Tube
from mmlens.model.video import VideoFile, probe
from mmlens.tasks.base import Example
from mmlens.tasks.data import DataTask, box_inside
from mmlens.tasks.reading import one_of, subject_in
from mmlens.tasks.rows import Each, Fault, Folder, JsonList, Row, Rows, load_json
from mmlens.tasks.scoring import exact

HALVES = {"train": "training", "val": "training", "test": "validation"}  # VidOR's, by VidSTG's split


class VidStg(DataTask):
    """What is asked about, in a clip of a video; its tube is the evidence, and the other things' tubes the distractors.

    The answer is the category of the thing, by any of its names ("ball/sports_ball": "ball" or "sports ball"). Tubes
    count the frames of the whole file; the clip is the record's used segment.

    Parameters
    ----------
    ask
        "question": the records' questions; or "caption": sentences, of which one thing is asked.
    """

    name = "vidstg"
    layout = (
        "annotations/val_annotations.json (or train, test) of VidSTG; VidOR's training/ or validation/ with "
        "<group>/<video>.json, in the folder, vidor/ or annotation/; and <group>/<video>.mp4 in videos/ or vidor/"
    )
    subsets: ClassVar[tuple[str, ...]] = ("val", "test", "train")

    def __init__(
        self,
        path: str | Path,
        *,
        ask: Literal["question", "caption"] = "question",
        subset: str | None = None,
        batch: int = 1,
    ) -> None:
        self.ask = one_of("ask", ask, ("question", "caption"))
        self.options = {"ask": ask}
        self._held: tuple[str, Row] | None = None
        super().__init__(path, subset=subset, batch=batch)

    def open(self) -> Rows:
        self.folder: Folder = self._folder()
        name = f"{self.subset}_annotations.json"
        path = self.folder.first(f"annotations/{name}", name, f"**/{name}")
        half = HALVES[self.subset]
        places = (half, f"vidor/{half}", f"annotation/{half}", f"annotations/{half}", f"vidor/annotation/{half}")
        self.trajectories = {p.stem: p for p in self.folder.all(*(f"{place}/*/*.json" for place in places))}
        self.folder.first(*(f"{place}/*/*.json" for place in places))
        return Each(JsonList(path, layout=self.layout), f"{self.ask}s")

    def record_id(self, row: Row) -> str:
        span, who = row["temporal_gt"], row["used_relation"]
        return (
            f"{row['vid']}/{row['used_segment']['begin_fid']}/{span['begin_fid']}-{span['end_fid']}/"
            f"{who['subject_tid']}-{who['predicate']}-{who['object_tid']}/{self.ask}{row['item']}"
        )

    def group(self, row: Row) -> str:
        return str(row["vid"])

    def _vidor(self, vid: str) -> Row:
        if self._held is None or self._held[0] != vid:
            if vid not in self.trajectories:
                raise Fault(f"VidOR's {vid}.json is missing from {HALVES[self.subset]}/")
            try:
                self._held = vid, load_json(self.trajectories[vid], layout=self.layout)
            except DataError:
                raise Fault(f"VidOR's {vid}.json is no JSON") from None
        return self._held[1]

    def read(self, row: Row) -> Example:
        asked = row[f"{self.ask}s"][row["item"]]
        target, vidor = asked["target_id"], self._vidor(row["vid"])
        size = (row["width"], row["height"])
        for key in ("frame_count", "width", "height"):
            if vidor[key] != row[key]:
                raise Fault(f"VidOR says {key} {vidor[key]}, VidSTG {row[key]}")
        # the segment's last frame is in it; the relation's end is the frame after its last
        first, last = row["used_segment"]["begin_fid"], row["used_segment"]["end_fid"]
        begin, end = row["temporal_gt"]["begin_fid"], row["temporal_gt"]["end_fid"]
        if not 0 <= first <= begin < end <= last + 1 <= row["frame_count"]:
            raise Fault(f"frames [{begin}, {end}) of the segment {first} to {last} of {row['frame_count']}")
        tubes = self._tubes(vidor, begin, end, size)
        lacking = sorted(set(range(begin, end)) - set(tubes.get(target, {})))
        if lacking:
            raise Fault(f"VidOR has no box of thing {target} in frame {lacking[0]}")
        video = self.folder.find(vidor["video_path"], "videos", "video", "vidor", "vidor/videos", "vidor/video")
        info = probe(video)
        if (info.n_frames, info.width, info.height) != (row["frame_count"], *size):
            raise Fault(
                f"the video has {info.n_frames} frames of {info.width} x {info.height}, "
                f"VidOR's {row['frame_count']} of {size[0]} x {size[1]}"
            )
        category = next((t["category"] for t in row["subject/objects"] if t["tid"] == target), None)
        if category is None:
            raise Fault(f"thing {target} is not among the record's")
        words = asked["description"]
        question = f"{words} Answer with its name."
        if self.ask == "caption":
            question = f'Of which {asked["type"]} is this said: "{words}"? Answer with its name.'
        return Example(
            id=self.record_id(row),
            question=question,
            answers=tuple(dict.fromkeys(part.replace("_", " ") for part in category.split("/"))),
            video=VideoFile(video, first, last + 1),
            subject=subject_in(question, words) if self.ask == "caption" else None,
            evidence=(Tube.from_frames(tubes.pop(target)),),
            distractors=tuple(Tube.from_frames(places) for _, places in sorted(tubes.items())),
            meta={"category": category, "type": asked["type"], "predicate": row["used_relation"]["predicate"]},
        )

    def _tubes(self, vidor: Row, begin: int, end: int, size: tuple[int, int]) -> dict[Any, dict[int, Box]]:
        """{thing: {frame of the file: box}} from frame `begin` up to but not including `end`."""
        found: dict[Any, dict[int, Box]] = {}
        for frame in range(begin, end):
            for thing in vidor["trajectories"][frame]:
                corners = thing["bbox"]
                box = Box.from_xyxy(corners["xmin"], corners["ymin"], corners["xmax"], corners["ymax"])
                found.setdefault(thing["tid"], {})[frame] = box_inside(box, *size)
        return found

    def score(self, said: str, example: Example) -> float:
        return float(exact(said, example.answers))
