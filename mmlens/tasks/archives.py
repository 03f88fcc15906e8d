"""Unpacking a data set's .zip and .tar.gz files, which others made, without letting them write anywhere else."""

from __future__ import annotations

import lzma
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mmlens.errors import DataError

# RuntimeError: an encrypted zip, and one of a compression that nobody has; ValueError: names that are no text.
BROKEN = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
)
LARGEST_ARCHIVE = 50 * 2**30  # bytes, unpacked
LARGEST_RATIO = 200  # unpacked over packed; JSON text packs 10 to 30 times


def extract(archive: str | Path, into: str | Path) -> list[Path]:
    """Unpack a .zip, .tar or .tar.gz of a data set; nothing is written outside `into`, and no links or devices.

    Raises
    ------
    DataError
        For a file that is missing, broken, encrypted or no archive; and at the first member that would leave the
        folder, is neither file nor folder, or would make the whole more than 50 GiB or 200 times the archive. What came
        before it stays.
    """
    archive, into = Path(archive), Path(into)
    written: list[Path] = []
    total = 0
    try:
        into.mkdir(parents=True, exist_ok=True)
        most = min(LARGEST_ARCHIVE, LARGEST_RATIO * max(archive.stat().st_size, 2**20))
        for name, size, plain, source in _members(archive):
            target = into / name
            total += size
            if not plain or not target.resolve().is_relative_to(into.resolve()) or Path(name).is_absolute():
                raise _refused(archive, f"the member {name!r}, which is a link, a device or outside the folder")
            if total > most:
                raise _refused(archive, f"more than {most:,} bytes unpacked")
            target.parent.mkdir(parents=True, exist_ok=True)
            with source() as packed, target.open("wb") as file:
                shutil.copyfileobj(packed, file)
            written.append(target)
    except BROKEN as error:
        raise DataError(
            f"{archive} cannot be unpacked into {into}: {error}",
            expected="a whole .zip, .tar or .tar.gz without a password, and a folder that can be written",
            fix="download it again, or unpack it by hand",
        ) from None
    return written


def _members(archive: Path) -> Iterator[tuple[str, int, bool, Callable[[], Any]]]:
    """(name, size, whether a plain file, what opens it) of every member but folders."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                if not info.is_dir():
                    mode = info.external_attr >> 16
                    plain = stat.S_IFMT(mode) in (0, stat.S_IFREG)
                    yield info.filename, info.file_size, plain, partial(packed.open, info)
        return
    with tarfile.open(archive) as packed_tar:
        for member in packed_tar:
            if not member.isdir():
                yield member.name, member.size, member.isreg(), partial(packed_tar.extractfile, member)


def _refused(archive: Path, what: str) -> DataError:
    return DataError(f"{archive} holds {what}", expected="a data set's own files", fix="fetch it from its authors")
