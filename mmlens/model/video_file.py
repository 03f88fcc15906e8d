"""Frames out of a video file, by their own time stamps: what its packets say, and decoding exactly the wanted ones."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmlens.errors import VideoError


@dataclass(frozen=True)
class VideoInfo:
    """What a file's packets say without decoding: sizes in stored pixels, rates in frames per second.

    `fps` is the average rate. `times` has one entry a frame, in seconds and in the order of showing; frame 0 is at 0.0.
    """

    n_frames: int
    fps: float
    width: int
    height: int
    times: tuple[float, ...]


@dataclass(frozen=True)
class Index:
    """A file's frames: their time stamps (None where they are not to be trusted), and its key frames' (pts, dts)."""

    info: VideoInfo
    pts: tuple[int, ...] | None
    keys: tuple[tuple[int, int], ...]


def index_of(path: str | os.PathLike[str]) -> Index:
    """A file's frames, read again only after it has changed."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not Path(path).is_file():
        raise _unreadable(path, "it is not a file")
    return _index(os.path.abspath(path), status.st_mtime_ns, status.st_size)


def _unreadable(path: str | os.PathLike[str], why: object) -> VideoError:
    return VideoError(
        f"video {str(path)!r} cannot be read: {why}",
        expected="a local video file, whole and of a format that ffmpeg decodes",
        fix="check the path and the file (a cut-off download is the usual cause)",
    )


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[tuple[Any, Any]]:
    """(container, first stream of moving pictures)."""
    try:
        import av
    except ImportError as error:
        raise VideoError("a video file without PyAV", expected="the package av", fix="pip install av") from error
    try:
        with av.open(os.path.abspath(path), metadata_errors="ignore") as container:
            covers = av.stream.Disposition.attached_pic
            moving = [s for s in container.streams.video if not s.disposition & covers]  # a song's cover is no video
            if not moving or moving[0].codec_context is None or not moving[0].codec_context.width:
                raise _unreadable(path, "it holds no video stream that can be decoded")
            moving[0].thread_type = "AUTO"
            yield container, moving[0]
    except av.FFmpegError as error:
        raise _unreadable(path, error) from error


@lru_cache(maxsize=64)
def _index(path: str, mtime_ns: int, size: int) -> Index:
    """Demuxed once for each state of a file."""
    del mtime_ns
    stamps: list[int | None] = []
    keys, packets, torn, last_dts = [], 0, False, None
    with _opened(path) as (container, stream):
        for packet in _packets(container, stream):
            if not packet.size:
                continue
            packets += 1
            torn = packet.is_corrupt  # of the last one: the file ends within it
            last_dts = last_dts if packet.dts is None or torn else packet.dts
            if packet.is_keyframe and packet.pts is not None:
                keys.append((packet.pts, packet.pts if packet.dts is None else packet.dts))
            if not packet.is_discard:  # an edit list's: decoded, never shown
                stamps.append(packet.pts)
        width, height = stream.codec_context.width, stream.codec_context.height
        step, declared = stream.time_base, stream.average_rate or stream.guessed_rate
        transport = "mpegts" in container.format.name  # packets of 188 bytes, on some media 192 or 204
        torn = torn or (transport and all(size % each for each in (188, 192, 204)))
        if torn and stamps:
            stamps.pop()
        ordered = sorted({pts for pts in stamps if pts is not None})
        # avi stores no times of showing (ffmpeg makes them up, wrongly for H.264 with B-frames)
        timed = len(ordered) == len(stamps) and "avi" not in container.format.name.split(",")
        if timed and len(ordered) > 1:
            last_dts = ordered[0] if last_dts is None else last_dts
            end = _declared_end(path, stream, packets)
            if torn or (end is not None and end > size):
                ordered = ordered[: bisect_right(ordered, last_dts)]  # B-frames after it may be lost: numbers unsure
            elif end is None:
                ordered = _before_gap(ordered, last_dts, 1 / declared / step if declared else np.inf)
    n = len(ordered) if timed else len(stamps)
    if n == 0:
        raise _unreadable(path, "it holds no whole frame")
    if timed:
        exact = [(pts - ordered[0]) * step for pts in ordered]
        rate = (n - 1) / exact[-1] if n > 1 else declared or Fraction(1)
    elif declared:
        exact, rate = [i / declared for i in range(n)], declared
    else:
        raise _unreadable(path, "it says neither its frames' times nor their rate")
    info = VideoInfo(n, float(rate), width, height, tuple(float(t) for t in exact))
    return Index(info, tuple(ordered) if timed else None, tuple(sorted(keys)))


def _declared_end(path: str, stream: Any, packets: int) -> int | None:
    """The byte at which the file should end at the earliest; None where the container does not say (ts, live streams).

    From an index of all packets (mp4), or from the size of a Matroska file's segment, which ffmpeg keeps to itself.
    """
    indexed = [entry.pos + entry.size for entry in stream.index_entries if entry.size]
    if len(indexed) >= packets:
        return max(indexed)
    with open(path, "rb") as file:
        for name in (b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"):
            if file.read(4) != name or not (first := file.read(1)) or not first[0]:
                return None
            length = 9 - first[0].bit_length()  # an EBML number: as many leading zeros as further bytes
            value = int.from_bytes(first + file.read(length - 1), "big") - (1 << 7 * length)
            end = file.seek(value, os.SEEK_CUR) if name[0] == 0x1A else file.tell() + value
    return None if value == (1 << 7 * length) - 1 else end  # all ones: unknown, a live recording


def _before_gap(ordered: list[int], last_dts: int, usual: Any) -> list[int]:
    """Frames before a gap that a lost end may have left; up to the last packet's dts they are complete."""
    gaps = np.diff(ordered)
    usual = float(np.median(gaps)) if len(gaps) > 8 else min(float(usual), float(gaps.min()))
    for i in range(max(bisect_right(ordered, last_dts), 1), len(ordered)):
        if gaps[i - 1] > 1.5 * usual:
            return ordered[:i]
    return ordered


def _packets(container: Any, stream: Any) -> Iterator[Any]:
    """The stream's packets, the empty one that flushes the decoder last; a read error ends them too."""
    import av

    try:
        yield from container.demux(stream)
    except av.FFmpegError:
        return


def decode(path: str | os.PathLike[str], index: Index, wanted: Sequence[int]) -> dict[int, Image.Image]:
    """The wanted frames (sorted, unique) that can be decoded: by seeking, and by a whole decode where that fails."""
    import av

    found: dict[int, Image.Image] = {}
    if index.pts is not None:
        with _opened(path) as opened:
            try:
                for i, frame in _sought(*opened, index, wanted):
                    found[i] = _picture(frame, index.info, path)
            except av.FFmpegError:
                pass  # damage: the whole decode below tells which frames it left
    missing = [i for i in wanted if i not in found]
    if missing:
        with _opened(path) as opened:
            found |= _whole(*opened, index, missing, path)
    return found


def _sought(container: Any, stream: Any, index: Index, wanted: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """(number, frame), decoded from the key frame before each; stops at the first surprise."""
    assert index.pts is not None
    todo, fed, sought = list(reversed(wanted)), None, None
    while todo:
        key = _key(index, todo[-1])
        if key is not None and (fed is None or key[1] > fed):
            container.seek(min(key), stream=stream)
            sought = key
        landing = sought is not None
        for packet in _packets(container, stream):
            if landing and (not packet.is_keyframe or packet.pts is None or packet.pts > key[0]):  # type: ignore[index]
                return  # the seek went past the key frame
            landing = False
            if packet.is_corrupt:
                return
            for frame in packet.decode():
                if frame.pts is None or frame.pts > index.pts[todo[-1]]:
                    return
                if frame.pts == index.pts[todo[-1]]:
                    if frame.is_corrupt:
                        return
                    yield todo.pop(), frame
                    if not todo:
                        return
            fed = packet.dts if packet.dts is not None else fed
            following = _key(index, todo[-1])
            if following is not None and following != sought and fed is not None and following[1] > fed:
                break
        else:
            return


def _key(index: Index, i: int) -> tuple[int, int] | None:
    """(pts, dts) of the last key frame not after frame i; None where decoding starts at the file's beginning."""
    assert index.pts is not None
    at = bisect_right(index.keys, index.pts[i], key=lambda key: key[0]) - 1
    return index.keys[at] if at > 0 else None


def _whole(
    container: Any, stream: Any, index: Index, wanted: Sequence[int], path: str | os.PathLike[str]
) -> dict[int, Image.Image]:
    """The wanted frames from a decode of everything; nothing is believed from damage on to the next key frame.

    Frames without usable times are told by their order, which holds only when none is lost.
    """
    import av

    number = {index.pts[i]: i for i in wanted} if index.pts is not None else {i: i for i in wanted}
    found: dict[int, Image.Image] = {}
    count, intact, believed, since = 0, True, True, None
    for packet in _packets(container, stream):
        if not believed and packet.is_keyframe and not packet.is_corrupt:
            believed, since = True, packet.pts
        if not believed:
            continue
        try:
            frames = stream.codec_context.decode(None) if packet.is_corrupt else packet.decode()
        except av.FFmpegError:
            frames, believed = [], False
        if packet.is_corrupt or not believed:
            intact = believed = False
            stream.codec_context.flush_buffers()
        for frame in frames:
            stamp = count if index.pts is None else frame.pts
            count += 1
            early = since is not None and index.pts is not None and (stamp is None or stamp < since)
            if stamp in number and not frame.is_corrupt and not early:
                found[number[stamp]] = _picture(frame, index.info, path)
    return found if index.pts is not None or (intact and count == index.info.n_frames) else {}


def _picture(frame: Any, info: VideoInfo, path: str | os.PathLike[str]) -> Image.Image:
    if (frame.width, frame.height) != (info.width, info.height):
        raise VideoError(
            f"frames of {info.width} x {info.height} and of {frame.width} x {frame.height} pixels in {str(path)!r}",
            expected="frames of one size",
            fix="re-encode it at one size, or choose frames before the change",
        )
    return frame.to_image()
