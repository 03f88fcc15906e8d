"""Video-MME (Fu et al. 2025): four choices about short, medium and long videos."""

from __future__ import annotations

import re
from typing import ClassVar

from mmlens.tasks.base import Example
from mmlens.tasks.data import Fault
from mmlens.tasks.reading import Lettered, letters_for
from mmlens.tasks.rows import Folder, Parquet, Row, Rows
from mmlens.tasks.scoring import lettered

SUFFIXES = (".mp4", ".MP4", ".mkv", ".webm")


class VideoMme(Lettered):
    """Questions about whole videos, without subtitles; no evidence is annotated.

    Parameters
    ----------
    subset
        "all", or one length: "short", "medium", "long".
    """

    name = "video-mme"
    layout = (
        "the parquet file of lmms-lab/Video-MME (in the folder or in videomme/) and its unzipped videos as "
        "videos/<videoID>.mp4 or data/<videoID>.mp4"
    )
    subsets: ClassVar[tuple[str, ...]] = ("all", "short", "medium", "long")
    chance = 0.25

    def open(self) -> Rows:
        self.folder: Folder = self._folder()
        patterns = ("*.parquet", "videomme/*.parquet", "data/*.parquet")
        return Parquet(self.folder.all(*patterns) or [self.folder.first(*patterns)], layout=self.layout)

    def belongs(self, row: Row) -> bool:
        return self.subset in ("all", row["duration"])

    def record_id(self, row: Row) -> str:
        return str(row["question_id"])

    def group(self, row: Row) -> str:
        return str(row["videoID"])

    def read(self, row: Row) -> Example:
        # the options come with their letters: "A. Red"
        options = [re.sub(r"^[A-Z][.)]\s*", "", str(option)) for option in row["options"]]
        if row["answer"] not in letters_for(options):
            raise Fault(f"the answer {row['answer']!r} to {len(options)} choices")
        names = [row["videoID"] + suffix for suffix in SUFFIXES]
        places = ("videos", "data", "videos/data")
        found = [n for n in names if any((self.folder.root / p / n).is_file() for p in places)]
        video = self.folder.find(found[0] if found else names[0], *places)
        return Example(
            id=self.record_id(row),
            question=f"{row['question']}\n{lettered(options)}\n{self.ask}",
            answers=(row["answer"],),
            video=str(video),
            choices=letters_for(options),
            meta={
                "options": tuple(options),
                **{k: row[k] for k in ("duration", "domain", "sub_category", "task_type")},
            },
        )
