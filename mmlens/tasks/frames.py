"""A video stored as picture files, one a frame: its times are known, its frames decoded whenever they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmlens.errors import VideoError
from mmlens.model.pictures import load_picture
from mmlens.model.video import Video


class StoredFrames(Video):
    """A `Video` of picture files, `fps` of them a second; holds the paths only.

    Raises
    ------
    VideoError
        For frames of several sizes. A file that is no picture raises PictureError, as everywhere.
    """

    def __init__(self, files: Sequence[Path], *, fps: float) -> None:
        n = len(files)
        sizes = {load_picture(file).size for file in files}
        if len(sizes) != 1:
            raise VideoError(
                f"a video of {n} frames with the sizes {sorted(sizes)}",
                expected="at least one frame, and one size",
                fix="scale them first",
            )
        more: dict[str, Any] = {"indices": tuple(range(n)), "times": tuple(i / fps for i in range(n))}
        for name, value in {
            **more,
            "fps": float(fps),
            "n_source": n,
            "files": tuple(files),
            "_size": sizes.pop(),
        }.items():
            object.__setattr__(self, name, value)

    @property
    def frames(self) -> Any:  # type: ignore[override]
        """RGB pictures, decoded anew."""
        return tuple(load_picture(file) for file in self.files)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the frames in pixels."""
        return self._size  # type: ignore[attr-defined,no-any-return]

    def __repr__(self) -> str:
        return f"StoredFrames({len(self)} frames, fps={self.fps})"
