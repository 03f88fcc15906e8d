"""Archives and pickles that are missing, locked, of another kind or in the way: one DataError each."""

import zipfile

import pytest

from mmlens.errors import DataError
from mmlens.tasks.archives import extract
from mmlens.tasks.unpickle import load_plain


def packed(path, *, flag=0, method=0):
    """A zip of one file whose directory says this flag and compression."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a", "x")
    data = bytearray(path.read_bytes())
    at = data.find(b"PK\x01\x02")
    data[at + 8] |= flag
    data[at + 10] = method
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("how", [{"flag": 1}, {"method": 99}, {"method": 14}])
def test_an_encrypted_zip_or_one_of_another_compression_is_a_data_error(tmp_path, how):
    with pytest.raises(DataError, match="cannot be unpacked"):
        extract(packed(tmp_path / "a.zip", **how), tmp_path / "out")


def test_an_archive_that_is_missing_and_a_target_that_is_a_file_are_data_errors(tmp_path):
    with pytest.raises(DataError, match="cannot be unpacked"):
        extract(tmp_path / "none.zip", tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be unpacked into"):
        extract(packed(tmp_path / "a.zip"), tmp_path / "file")


def test_a_pickle_that_is_missing_or_a_folder_is_a_data_error(tmp_path):
    for path in (tmp_path / "none.p", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            load_plain(path)
