"""Video files: exactly the asked frames, their true times, and those times in the processors' hands."""

import random
import re
from fractions import Fraction

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmlens.errors import OptionError, PictureError, VideoError
from mmlens.model import video as room
from mmlens.model import video_file
from mmlens.model.video import Video, VideoFile, frames_of, probe, processor_options, read_video, sample_frames

av = pytest.importorskip("av")
SIDE = 16


def _numbered(i):
    """Frame i: its bits as grey blocks that survive compression."""
    pixels = np.zeros((2 * SIDE, 4 * SIDE, 3), np.uint8)
    for bit in range(8):
        row, column = bit // 4 * SIDE, bit % 4 * SIDE
        pixels[row : row + SIDE, column : column + SIDE] = 255 * (i >> bit & 1)
    return pixels


def _number(frame):
    pixels = np.asarray(frame, float)[:, :, 1].reshape(2, SIDE, 4, SIDE)[:, 4:-4, :, 4:-4].mean((1, 3)).ravel()
    return sum(int(value > 128) << bit for bit, value in enumerate(pixels))


def _write(path, n=60, rate=25, codec="libx264", pts=None, ticks=None, first=0, muxer=None, **options):
    """A clip of numbered frames; by default with three B-frames and a key frame every 12."""
    rate = Fraction(rate)
    defaults = {"bf": "3", "g": "12"} if codec == "libx264" else {"g": "12"}
    with av.open(str(path), "w", options=muxer or {}) as container:
        stream = container.add_stream(codec, rate=rate, options=defaults | options)
        stream.width, stream.height, stream.pix_fmt = 4 * SIDE, 2 * SIDE, "yuv420p"
        if ticks:
            stream.codec_context.time_base = ticks
        for i in range(n):
            frame = av.VideoFrame.from_ndarray(_numbered(i), format="rgb24")
            frame.pts, frame.time_base = pts[i] if pts else i + first, ticks or 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


UNEVEN = [0, 20, 40, 300, 310, 900, 960, 1000, 1033, 1066, 1100, 2500, 2540, 2580, 4000]
CLIPS = {
    "b-frames.mp4": dict(),
    "open-gop.mp4": dict(**{"x264-params": "open-gop=1:b-adapt=0"}),
    "b-frames.mkv": dict(n=59),
    "ntsc.mp4": dict(n=61, rate=Fraction(30000, 1001)),
    "ntsc.mkv": dict(n=61, rate=Fraction(30000, 1001)),
    "uneven.mp4": dict(n=len(UNEVEN), pts=UNEVEN, ticks=Fraction(1, 1000), g="5"),
    "uneven.mkv": dict(n=len(UNEVEN), pts=UNEVEN, ticks=Fraction(1, 1000), g="5"),
    "late-start.ts": dict(n=47),
    "one.mp4": dict(n=1),
    "made-up-times.avi": dict(n=33),
    "no-times.h264": dict(n=33),
    "mpeg4.avi": dict(n=33, codec="mpeg4", bf="2"),
}


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return {name: _write(folder / name, **how) for name, how in CLIPS.items()}


# ---------------------------------------------------------------------- exact frames
@pytest.mark.parametrize("name", CLIPS)
def test_frames_are_those_asked_for_in_any_order(clips, name):
    n = CLIPS[name].get("n", 60)
    draw = random.Random(name)
    for _ in range(8):
        asked = [draw.randrange(n) for _ in range(draw.randrange(1, 9))]
        video = read_video(clips[name], indices=asked)
        assert [_number(f) for f in video.frames] == asked == list(video.indices)
        assert video.times == tuple(probe(clips[name]).times[i] for i in asked)
        assert video.n_source == n and video.size == (64, 32) and len(video) == len(asked)
    everything = read_video(clips[name], fps=None, max_frames=None)
    assert [_number(f) for f in everything.frames] == list(range(n))


def test_a_second_read_is_the_same(clips):
    one, two = (read_video(clips["open-gop.mp4"], fps=7) for _ in range(2))
    assert one.indices == two.indices and one.times == two.times
    assert all(np.array_equal(a, b) for a, b in zip(one.frames, two.frames))


def test_frames_equal_a_plain_decode_bitwise(clips):
    with av.open(str(clips["open-gop.mp4"])) as container:
        plain = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    for asked in ([13], [59, 12, 0], [11, 12, 13, 36]):
        for i, frame in zip(asked, read_video(clips["open-gop.mp4"], indices=asked).frames):
            assert np.array_equal(np.asarray(frame), plain[i])


def test_a_seek_skips_the_work_before_it(tmp_path, monkeypatch):
    path, fed = _write(tmp_path / "long.mp4", n=200), []
    packets = video_file._packets
    probe(path)

    def counted(container, stream):
        for packet in packets(container, stream):
            fed.append(packet.pts)
            yield packet

    monkeypatch.setattr(video_file, "_packets", counted)
    monkeypatch.setattr(video_file, "_whole", None)
    assert [_number(f) for f in read_video(path, indices=[185, 3]).frames] == [185, 3]
    assert len(fed) < 80  # the decoder's threads hold some frames back


def test_a_seek_that_lands_late_is_noticed(clips, monkeypatch):
    wrong = lambda index, i: (10**9, 10**6)
    monkeypatch.setattr(video_file, "_key", wrong)
    assert [_number(f) for f in read_video(clips["b-frames.mp4"], indices=[30, 5]).frames] == [30, 5]


def test_an_edit_list_hides_frames(tmp_path):
    path = _write(tmp_path / "edited.mp4", first=-10, muxer={"avoid_negative_ts": "disabled"})
    assert probe(path).n_frames == 50 and probe(path).times[0] == 0
    assert [_number(f) for f in read_video(path, indices=[0, 49, 7]).frames] == [10, 59, 17]


def test_changed_files_are_read_again(tmp_path):
    path = _write(tmp_path / "clip.mp4", n=10)
    assert probe(path).n_frames == 10
    assert probe(_write(path, n=23)).n_frames == 23


# ---------------------------------------------------------------------- counts, times, parts
@pytest.mark.parametrize("name", CLIPS)
def test_probe_counts_and_times(clips, name):
    how = CLIPS[name]
    n, rate = how.get("n", 60), float(how.get("rate", 25))
    info = probe(clips[name])
    true = [t / 1000 for t in UNEVEN] if "uneven" in name else [i / rate for i in range(n)]
    assert (info.n_frames, info.width, info.height, info.times[0]) == (n, 64, 32, 0)
    assert np.allclose(info.times, true, atol=1e-3 if name.endswith("mkv") else 1e-6)
    average = (n - 1) / true[-1] if n > 1 else rate
    assert info.fps == pytest.approx(average, rel=1e-3)


def test_parts_of_a_file_keep_its_numbers_and_times(clips):
    path = clips["b-frames.mp4"]
    part = read_video(VideoFile(path, 20, 31), fps=5)
    assert part.indices == (20, 25, 30) == tuple(_number(f) for f in part.frames)
    assert part.times == (0.8, 1.0, 1.2) and part.n_source == 60 and part.fps == 25
    assert part.sampled_fps == pytest.approx(5)
    assert read_video(VideoFile(str(path), 57), fps=None).indices == (57, 58, 59)
    with pytest.raises(VideoError, match="frame 31"):
        read_video(VideoFile(path, 20, 31), indices=[25, 31])
    for begin, end in ((60, None), (0, 61), (5, 5), (-1, 3)):
        with pytest.raises(VideoError, match="frames"):
            read_video(VideoFile(path, begin, end))


def test_defaults_are_two_a_second_and_at_most_64(clips, tmp_path):
    assert read_video(clips["b-frames.mp4"]).indices == (0, 12, 25, 37, 50)
    assert read_video(_write(tmp_path / "long.mp4", n=250, rate=5)).indices == sample_frames(
        [i / 5 for i in range(250)], fps=2, max_frames=64
    )
    with pytest.raises(OptionError, match="together"):
        read_video(clips["b-frames.mp4"], indices=[1], fps=2.0)
    with pytest.raises(OptionError, match="together"):
        read_video(clips["b-frames.mp4"], indices=[1], max_frames=None)


# ---------------------------------------------------------------------- the sampling rule
def test_sampling_by_hand():
    even = [i / 25 for i in range(51)]
    assert sample_frames(even) == tuple(range(51))
    assert sample_frames(even, fps=2) == (0, 12, 25, 37, 50)  # 12.5 and 37.5: ties go to the earlier
    assert sample_frames(even, fps=2, max_frames=3) == (0, 25, 50)
    assert sample_frames(even, fps=2, begin=3, end=30) == (3, 15, 28)
    assert sample_frames(even, fps=1000) == tuple(range(51))
    assert sample_frames(even, max_frames=1, begin=7) == (7,)
    assert sample_frames([0, 0.1, 5.0], fps=1) == (0, 1, 2)  # 1 and 2 are nearest to 0.1; 3, 4 and 5 to 5.0
    ntsc = [i * 1001 / 30000 for i in range(90)]
    assert sample_frames(ntsc, fps=2) == (0, 15, 30, 45, 60, 75)
    for wrong in (dict(fps=0), dict(fps=-1.0), dict(fps=float("nan")), dict(fps=float("inf")), dict(max_frames=0)):
        with pytest.raises(OptionError):
            sample_frames(even, **wrong)
    for wrong in (dict(begin=51), dict(end=52), dict(begin=3, end=3), dict(begin=-1)):
        with pytest.raises(VideoError):
            sample_frames(even, **wrong)
    with pytest.raises(VideoError):
        sample_frames([])


@given(
    gaps=st.lists(st.integers(1, 400), max_size=40),
    fps=st.none() | st.floats(0.05, 200),
    most=st.none() | st.integers(1, 20),
    cut=st.tuples(st.integers(0, 40), st.integers(1, 41)),
)
def test_sampling_follows_its_rule(gaps, fps, most, cut):
    times = np.cumsum([0, *gaps]) / 1000
    begin = min(cut[0], len(times) - 1)
    end = min(begin + cut[1], len(times))
    picked = sample_frames(times.tolist(), fps=fps, max_frames=most, begin=begin, end=end)
    assert list(picked) == sorted(set(picked)) and picked[0] == begin and picked[-1] < end
    assert most is None or len(picked) <= most
    every = sample_frames(times.tolist(), fps=fps, begin=begin, end=end)
    assert set(picked) <= set(every)
    if most is not None and len(every) > most:
        assert len(picked) == most and (most == 1 or picked[-1] == every[-1])
        steps = np.diff([every.index(i) for i in picked])
        assert len(steps) == 0 or steps.max() - steps.min() <= 1
    if fps is not None:  # each target has a nearest frame among them, each of them is nearest to a target
        span = times[begin:end]
        targets = np.arange(0, (span[-1] - span[0]) * fps + 1e-6) / fps + span[0]
        distance = np.abs(span[None] - targets[:, None])
        mine = np.array(every) - begin
        assert np.allclose(distance[:, mine].min(1), distance.min(1), atol=1e-5 / fps)
        assert np.all((distance[:, mine] - distance.min(1, keepdims=True)).min(0) <= 1e-5 / fps)


# ---------------------------------------------------------------------- broken files
@pytest.mark.parametrize("name", ["whole.mp4", "whole.mkv", "whole.ts"])
def test_a_file_cut_off_anywhere_gives_no_wrong_frame(tmp_path, name):
    path = _write(tmp_path / name, muxer={"movflags": "faststart"} if name.endswith("mp4") else None)
    whole, read = path.read_bytes(), 0
    plain = [np.asarray(frame) for frame in read_video(path, fps=None).frames]
    sizes = np.linspace(0.02, 0.995, 12) * len(whole)
    with av.open(str(path)) as container:  # and between packets, which nothing but the container's header tells
        sizes = [*sizes, *[p.pos for p in container.demux(video=0) if p.pos][1:60:5]]
    for part in sizes:
        part -= name.endswith("ts") and part % 188 == 0  # there, nothing tells
        cut = tmp_path / f"cut-{part:.0f}.{name[-3:]}"
        cut.write_bytes(whole[: int(part)])
        try:
            video = read_video(cut, fps=None)
        except VideoError as error:
            assert "cut-" in str(error)
            continue
        read += 1
        assert video.indices == tuple(range(len(video))) and np.allclose(video.times, probe(path).times[: len(video)])
        assert all(np.array_equal(frame, plain[i]) for i, frame in zip(video.indices, video.frames)), part
    assert read > 5


def test_damage_in_the_middle_costs_only_what_hangs_on_it(clips, tmp_path):
    path = clips["b-frames.mp4"]
    with av.open(str(path)) as container:
        packet = next(p for p in container.demux(video=0) if p.is_keyframe and p.pts == probe_pts(path, 24))
        place, size = packet.pos, packet.size
    broken = bytearray(path.read_bytes())
    broken[place : place + size] = b"\xff" * size
    (tmp_path / "broken.mp4").write_bytes(broken)
    asked = [3, 5, 40, 59]
    assert [_number(f) for f in read_video(tmp_path / "broken.mp4", indices=asked).frames] == asked
    with pytest.raises(VideoError, match=r"frame 26 .* cannot be decoded \(1 of 3"):
        read_video(tmp_path / "broken.mp4", indices=[3, 26, 59])


def probe_pts(path, i):
    return video_file.index_of(path).pts[i]


def test_what_is_no_video_is_refused(tmp_path, as_users):
    (tmp_path / "text.mp4").write_text("no video at all\n" * 50)
    (tmp_path / "empty.mp4").write_bytes(b"")
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 16000, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    for name, why in {
        "text.mp4": "Invalid data",
        "empty.mp4": "cannot be read",
        "sound.mp4": "no video stream",
        "absent.mp4": "No such file",
        ".": "not a file",
    }.items():
        with pytest.raises(VideoError, match=why) as caught:
            read_video(tmp_path / name)
        assert str(tmp_path / name) in caught.value.given and caught.value.expected and caught.value.fix
    with pytest.raises(VideoError, match="given as int"):
        read_video(5)
    with pytest.raises(VideoError, match="No such file"):
        read_video("http://localhost/video.mp4")


def test_wrong_frame_numbers_are_refused(clips):
    for wrong in ([60], [-1], [3, 99], []):
        with pytest.raises(VideoError, match="frame"):
            read_video(clips["b-frames.mp4"], indices=wrong)


@pytest.mark.parametrize("limit, value", [("MAX_FRAME_PIXELS", 64 * 32 - 1), ("MAX_VIDEO_PIXELS", 5 * 64 * 32 - 1)])
def test_what_would_fill_the_memory_is_refused_before_decoding(clips, monkeypatch, limit, value):
    monkeypatch.setattr(room, limit, value)
    if limit == "MAX_VIDEO_PIXELS":
        assert len(read_video(clips["b-frames.mp4"], indices=[0, 1, 2, 3, 3, 3])) == 6
    monkeypatch.setattr(room, "decode", None)
    with pytest.raises(VideoError, match="64 x 32 pixels"):
        read_video(clips["b-frames.mp4"])


# ---------------------------------------------------------------------- frames, and processors
def test_frames_as_they_are():
    frames = tiny.video(5)
    video = frames_of(frames, fps=4)
    assert video.indices == (0, 1, 2, 3, 4) and video.times == (0, 0.25, 0.5, 0.75, 1) and video.n_source == 5
    assert video.sampled_fps == video.fps == 4 and frames_of(frames).fps == 2
    array = np.stack([np.asarray(f) for f in frames])
    assert all(np.array_equal(a, b) for a, b in zip(frames_of(array).frames, frames))


def test_what_are_no_frames_is_refused(as_users):
    mixed = [tiny.picture(), tiny.picture(40)]
    for wrong in ([], "clip.mp4", 3, np.zeros((4, 5, 5, 3)), np.zeros((5, 5, 3), np.uint8), mixed, [object()]):
        with pytest.raises(PictureError):
            frames_of(wrong)
    for fps in (0, -1, float("nan")):
        with pytest.raises(OptionError):
            frames_of(tiny.video(), fps=fps)


def _processed(family, *videos):
    model, processor = tiny.FAMILIES[family]()
    text = {"qwen": "<vs><video><ve>"}.get(family[:4], "<video>") * len(videos)
    return processor, processor(text=[text], return_tensors="pt", **processor_options(videos))


def _big(video):
    """The same video in frames large enough for SmolVLM's and Qwen's least sizes."""
    return Video(tuple(f.resize((64, 64)) for f in video.frames), *vars_of(video))


def vars_of(video):
    return video.indices, video.times, video.fps, video.n_source


@pytest.mark.parametrize("name", ["b-frames.mp4", "ntsc.mp4", "ntsc.mkv", "uneven.mp4"])
def test_qwen3_writes_the_frames_own_times(clips, name):
    part = read_video(VideoFile(clips[name], 2), fps=3.0)
    other = read_video(clips[name], indices=[1, 4, 9, 10, 14])
    processor, out = _processed("qwen3-vl", part, other)
    text = processor.tokenizer.decode(out["input_ids"][0])
    expected = []
    for video in (part, other):
        t = [*video.times, video.times[-1]][: (len(video) + 1) // 2 * 2]
        expected += [(a + b) / 2 for a, b in zip(t[::2], t[1::2])]
    written = [float(s) for s in re.findall(r"<([\d.]+) seconds>", text)]
    assert np.allclose(written, expected, atol=0.0501) and len(written) == len(expected)


def test_qwen25_counts_true_seconds(clips):
    seconds = lambda video: _processed("qwen2.5-vl", video)[1]["second_per_grid_ts"].item()
    for name in ("b-frames.mp4", "ntsc.mp4", "ntsc.mkv"):
        # exactly 1: its positions are truncated, and 0.9995 would put every group one position too early
        assert seconds(read_video(clips[name])) == 1.0
        assert seconds(read_video(VideoFile(clips[name], 7), fps=2.0)) == 1.0
    assert seconds(read_video(clips["b-frames.mp4"], fps=None)) == pytest.approx(2 / 25)
    assert seconds(read_video(clips["b-frames.mp4"], indices=[30, 31, 32, 33])) == pytest.approx(2 / 25)
    assert seconds(read_video(clips["uneven.mp4"], indices=[0, 14])) == 8.0
    assert seconds(read_video(clips["b-frames.mp4"], indices=[9])) == pytest.approx(2 / 25)
    assert seconds(frames_of(tiny.video(7), fps=3)) == pytest.approx(2 / 3)


def test_smolvlm_writes_whole_seconds(clips):
    for name in ("b-frames.mp4", "ntsc.mkv", "uneven.mp4"):
        video = read_video(clips[name])
        processor, out = _processed("smolvlm", _big(video))
        text = processor.tokenizer.decode(out["input_ids"][0])
        written = [int(m) * 60 + int(s) for m, s in re.findall(r"(\d\d):(\d\d):", text)]
        assert written[-len(video) :] == [int(t) for t in video.times]


@pytest.mark.parametrize("family", sorted(tiny.HAS_VIDEO))
def test_every_processor_keeps_every_frame_and_a_second_call_is_the_same(clips, family):
    video = _big(read_video(clips["uneven.mp4"], indices=[0, 3, 4, 7, 11]))
    once, again = (_processed(family, video)[1] for _ in range(2))
    assert once["input_ids"].equal(again["input_ids"])
    assert video.indices == (0, 3, 4, 7, 11)
    if "video_grid_thw" in once:
        assert once["video_grid_thw"][0, 0] == 3


@given(st.lists(st.integers(1, 5000), max_size=30), st.floats(0.5, 60))
def test_stamps_never_fall_short_of_the_time(gaps, fps):
    for time in (np.cumsum([0, *gaps]) / 1000).tolist():
        stamp = room._stamp(time, fps)
        assert stamp / fps == pytest.approx(time, abs=1e-8) and int(stamp / fps) == int(time)


def test_pictures_come_as_stored(tmp_path):
    """A turned display matrix is not applied: boxes are given in stored pixels."""
    path = tmp_path / "turned.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        stream.set_display_rotation(90)
        for i in range(4):
            frame = av.VideoFrame.from_image(Image.fromarray(_numbered(i)))
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    video = read_video(path, fps=None)
    assert video.size == (64, 32) and [_number(f) for f in video.frames] == [0, 1, 2, 3]
