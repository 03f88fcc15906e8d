"""Videos as files or frames: which frames to show, the exact frames, and the times that a processor is told."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from math import inf, isfinite, nextafter
from typing import Any

import numpy as np
from PIL import Image

from mmlens.errors import OptionError, PictureError, VideoError
from mmlens.model.pictures import load_picture
from mmlens.model.video_file import VideoInfo, decode, index_of

MAX_FRAME_PIXELS = 2**26
MAX_VIDEO_PIXELS = 2**32


class Default(Enum):
    """What `read_video` does where a caller says nothing; told apart from None, which lifts the limit."""

    FPS = 2.0
    MAX_FRAMES = 64


def _is_rate(fps: Any) -> bool:
    return isinstance(fps, int | float) and not isinstance(fps, bool) and fps > 0 and isfinite(fps)


def _is_count(n: Any) -> bool:
    return isinstance(n, int | np.integer) and not isinstance(n, bool)


SUFFIXES = (".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v", ".mpg", ".mpeg", ".ts", ".flv")


def is_video(path: str | os.PathLike[str]) -> bool:
    """Whether a file's name is that of a video."""
    return os.fspath(path).lower().endswith(SUFFIXES)


@dataclass(frozen=True)
class VideoFile:
    """Frames [begin, end) of a video file, counted from 0 in the order of showing; `end=None` is the file's end."""

    path: str | os.PathLike[str]
    begin: int = 0
    end: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike):
            raise VideoError(
                f"a video given as {type(self.path).__name__}",
                expected="a path to a video file",
                fix="frames_of(frames) for frames that are already decoded",
            )
        whole = _is_count(self.begin) and (self.end is None or _is_count(self.end))
        if not whole or self.begin < 0 or (self.end is not None and self.end <= self.begin):
            raise VideoError(
                f"frames [{self.begin!r}, {self.end!r}) of {str(self.path)!r}",
                expected="0 <= begin < end, in the file's own frames",
                fix="VideoFile(path, begin=0, end=None) for the whole file",
            )


@dataclass(frozen=True, eq=False)
class Video:
    """Chosen frames of a video.

    Attributes
    ----------
    frames
        RGB pictures of one size, as stored: a display rotation in the file is not applied.
    indices, times
        Each frame's number in its source, and its time there in seconds.
    fps
        The source's average rate, not that of the chosen frames.
    n_source
        Frames in the source.
    """

    frames: tuple[Image.Image, ...]
    indices: tuple[int, ...]
    times: tuple[float, ...]
    fps: float
    n_source: int

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the frames in pixels."""
        return self.frames[0].size

    @property
    def sampled_fps(self) -> float:
        """Average rate of the chosen frames; the source's for a single frame."""
        span = max(self.times) - min(self.times)
        return (len(self) - 1) / span if span > 0 else self.fps


def probe(path: str | os.PathLike[str]) -> VideoInfo:
    """Frame count, rate, size and every frame's time, from the packets alone (so also for mkv, which stores no count).

    Containers without usable times of showing (avi, raw streams) are taken to have an even rate. Of a file that was cut
    off, the whole frames before the cut are counted: its times then end early. Transport and raw streams do not say
    where their last frame ends, so half a frame there can pass for a whole one.
    """
    return index_of(path).info


def sample_frames(
    times: VideoInfo | Sequence[float],
    *,
    fps: float | None = None,
    max_frames: int | None = None,
    begin: int = 0,
    end: int | None = None,
) -> tuple[int, ...]:
    """Numbers of the frames to show: sorted, none twice, all in [begin, end).

    1. Candidates: with `fps=None` every frame of the span. Otherwise, for k = 0, 1, 2, ... as long as t0 + k / fps is
       not after the span's last frame, the frame nearest to t0 + k / fps, where t0 is the time of frame `begin`; a
       tie goes to the earlier frame, and a frame that is nearest twice is taken once.
    2. More than `max_frames` candidates are thinned to the candidates numbered
       round(linspace(0, count - 1, max_frames)): the first and the last stay (the first alone for `max_frames=1`).
    """
    if fps is not None and not _is_rate(fps):
        raise OptionError(f"fps={fps!r}", expected="frames per second, above 0", fix="fps=2.0, or None for every frame")
    if max_frames is not None and not (_is_count(max_frames) and max_frames >= 1):
        raise OptionError(f"max_frames={max_frames!r}", expected="1 or more", fix="max_frames=64, or None for no limit")
    known = times.times if isinstance(times, VideoInfo) else times
    begin, end = _span(begin, end, len(known))
    picked = np.arange(begin, end)
    if fps is not None:
        t = np.asarray(known[begin:end], dtype=float) - known[begin]
        # frame i is nearest to times in (upper[i - 1], upper[i]]; it is shown where a multiple of 1 / fps lies there
        upper = np.append((t[:-1] + t[1:]) / 2, t[-1])
        picked = picked[np.diff(np.floor(upper * fps + 1e-6), prepend=-1.0) > 0]
    if max_frames is not None and len(picked) > max_frames:
        picked = picked[np.linspace(0, len(picked) - 1, max_frames).round().astype(int)]
    return tuple(picked.tolist())


def read_video(
    video: str | os.PathLike[str] | VideoFile,
    *,
    fps: float | Default | None = Default.FPS,
    max_frames: int | Default | None = Default.MAX_FRAMES,
    indices: Sequence[int] | None = None,
) -> Video:
    """Exactly the chosen frames of a file.

    Parameters
    ----------
    video
        A path, or `VideoFile` for a part of it.
    fps, max_frames
        As for `sample_frames`; 2.0 and 64 where not given.
    indices
        Frame numbers instead, counted in the whole file, in any order and with repeats.
    """
    file = video if isinstance(video, VideoFile) else VideoFile(video)
    index = index_of(file.path)
    info = index.info
    begin, end = _span(file.begin, file.end, info.n_frames, f"of {str(file.path)!r}")
    if indices is None:
        rate = Default.FPS.value if isinstance(fps, Default) else fps
        limit = Default.MAX_FRAMES.value if isinstance(max_frames, Default) else max_frames
        asked = sample_frames(info, fps=rate, max_frames=limit, begin=begin, end=end)
    elif not (isinstance(fps, Default) and isinstance(max_frames, Default)):
        raise OptionError(
            "indices= together with fps= or max_frames=", expected="one way to choose frames", fix="leave the other out"
        )
    else:
        asked = tuple(int(i) for i in indices)
        outside = [i for i in asked if not begin <= i < end]
        if outside or not asked:
            raise VideoError(
                f"frame {outside[0]} of {str(file.path)!r}" if outside else "indices=[]: no frames",
                expected=f"frame numbers from {begin} to {end - 1}",
                fix="mmlens.model.video.probe(path) tells how many frames a file has",
            )
    wanted = sorted(set(asked))
    pixels = info.width * info.height
    if pixels > MAX_FRAME_PIXELS or pixels * len(wanted) > MAX_VIDEO_PIXELS:
        raise VideoError(
            f"{len(wanted)} frames of {info.width} x {info.height} pixels from {str(file.path)!r}",
            expected=f"at most {MAX_FRAME_PIXELS:,} pixels a frame and {MAX_VIDEO_PIXELS:,} in all",
            fix="choose fewer frames (fps=, max_frames=), or scale the file down first",
        )
    frames = decode(file.path, index, wanted)
    missing = [i for i in wanted if i not in frames]
    if missing:
        raise VideoError(
            f"frame {missing[0]} of {str(file.path)!r} cannot be decoded ({len(missing)} of {len(wanted)} frames)",
            expected="a whole, undamaged video",
            fix="fetch the file again, re-encode it, or choose other frames with indices=",
        )
    shown = tuple(frames[i] for i in asked)
    return Video(shown, asked, tuple(info.times[i] for i in asked), info.fps, info.n_frames)


def frames_of(frames: Sequence[Any] | np.ndarray, *, fps: float = 2.0) -> Video:
    """Frames that are already chosen (pictures, or a uint8 array (frame, height, width, 3)), `fps` of them a second."""
    array = isinstance(frames, np.ndarray)
    if array and (frames.ndim != 4 or frames.dtype != np.uint8):  # type: ignore[union-attr]
        kind = f"{frames.dtype} array of shape {frames.shape}"  # type: ignore[union-attr]
    elif not array and (not isinstance(frames, Sequence) or isinstance(frames, str | bytes)):
        kind = type(frames).__name__
    else:
        kind = "" if len(frames) else f"{type(frames).__name__}, without frames"
    if kind:
        raise PictureError(
            f"a video given as {kind}",
            expected="a list of pictures, or a uint8 array (frame, height, width, 3)",
            fix="decode it to frames first: videos=[[frame, frame, ...]]",
        )
    if not _is_rate(fps):
        raise OptionError(f"fps={fps!r}", expected="frames per second, above 0", fix="fps=2.0")
    shown = tuple(load_picture(frame) for frame in frames)
    if len({frame.size for frame in shown}) > 1:
        raise PictureError(
            f"a video with frames of {sorted({f.size for f in shown})} pixels",
            expected="frames of one size",
            fix="scale them first",
        )
    n = len(shown)
    return Video(shown, tuple(range(n)), tuple(i / fps for i in range(n)), float(fps), n)


def processor_options(videos: Sequence[Video]) -> dict[str, Any]:
    """A processor's options: no frame dropped, and every time that it writes or counts is the frame's own.

    With `do_sample_frames=False` (transformers 5.24):

    - Qwen3-VL, SmolVLM: text from frames_indices / fps. Qwen3-VL writes the mean of each pair of frames (an odd last
      one is its own pair) to 0.1 s; SmolVLM whole seconds, cut, and `duration` as that of the whole clip.
    - Qwen2.5-VL: `second_per_grid_ts` = 2 / (len(frames_indices) / total_num_frames * fps), one even step for the
      clip: uneven frames cannot be expressed. So total_num_frames is what makes it the shown frames' rate; with the
      source's own count, ten frames out of one second of an hour would count as spread over the hour.
    - Qwen2-VL, InternVL, LLaVA-OneVision: no times at all, only the order.
    """
    from transformers.video_utils import VideoMetadata

    metadata = []
    for video in videos:
        width, height = video.size
        rate = _even_rate(video)
        total = len(video) * video.fps / rate
        metadata.append(
            VideoMetadata(
                total_num_frames=round(total) if abs(total - round(total)) < 1e-6 else total,
                fps=video.fps,
                width=width,
                height=height,
                duration=video.n_source / video.fps,
                frames_indices=[_stamp(t, video.fps) for t in video.times],  # a fresh list: Qwen3-VL pads it in place
            )
        )
    return {"videos": [list(v.frames) for v in videos], "video_metadata": metadata, "do_sample_frames": False}


def _stamp(time: float, fps: float) -> float:
    """The number that over `fps` is `time`: the frame's own at an even rate, else a fraction; never short of it."""
    whole = round(time * fps)
    if abs(whole / fps - time) < 1e-9 and (whole / fps >= time or int(whole / fps) == int(time)):
        return whole
    stamp = time * fps
    return stamp if stamp / fps >= time else nextafter(stamp, inf)  # SmolVLM cuts 0.99... s to 0


def _even_rate(video: Video) -> float:
    """The simplest rate whose even grid the frames keep to within half a source frame; else their average rate.

    Frames nearest to 0, 0.5, 1, ... seconds come at 1.999 or 2.001 a second. Qwen2.5-VL truncates step * number, so
    that 2.001 would move every group but the first to the position before its own.
    """
    rate, tolerance = video.sampled_fps, 0.5 / video.fps + 1e-9
    if len(set(video.indices)) < 2 or max(video.indices) - min(video.indices) < len(video):
        return rate  # every frame: nothing was rounded to frames
    for denominator in range(1, 101):
        even = float(Fraction(rate).limit_denominator(denominator))
        if even and all(abs(t - video.times[0] - i / even) <= tolerance for i, t in enumerate(video.times)):
            return even
    return rate


def _span(begin: int, end: int | None, n: int, of: str = "of a video") -> tuple[int, int]:
    last = n if end is None else end
    if not 0 <= begin < last <= n:
        raise VideoError(
            f"frames [{begin}, {last}) {of} with {n} frames",
            expected=f"0 <= begin < end <= {n}",
            fix="count frames, not seconds; end=None is the last frame",
        )
    return begin, last
