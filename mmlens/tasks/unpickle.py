"""Python 2 pickles of plain data (RefCOCOg's refs), read without letting them run anything."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from mmlens.errors import DataError

LARGEST = 2 * 2**30  # bytes of a file

# Opcodes that only build containers, strings, bytes, numbers, bools and None. None looks a name up or calls anything.
_PLAIN = b"".join(
    (
        pickle.MARK + pickle.STOP + pickle.POP + pickle.POP_MARK + pickle.DUP + pickle.PROTO + pickle.FRAME,
        pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE + pickle.INT + pickle.BININT + pickle.BININT1 + pickle.BININT2,
        pickle.LONG + pickle.LONG1 + pickle.LONG4 + pickle.FLOAT + pickle.BINFLOAT,
        pickle.STRING + pickle.BINSTRING + pickle.SHORT_BINSTRING + pickle.UNICODE + pickle.BINUNICODE,
        pickle.SHORT_BINUNICODE + pickle.BINUNICODE8 + pickle.BINBYTES + pickle.SHORT_BINBYTES + pickle.BINBYTES8,
        pickle.TUPLE + pickle.EMPTY_TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3,
        pickle.LIST + pickle.EMPTY_LIST + pickle.APPEND + pickle.APPENDS,
        pickle.DICT + pickle.EMPTY_DICT + pickle.SETITEM + pickle.SETITEMS,
        pickle.EMPTY_SET + pickle.ADDITEMS + pickle.FROZENSET,
        pickle.PUT + pickle.BINPUT + pickle.LONG_BINPUT + pickle.MEMOIZE,
        pickle.GET + pickle.BINGET + pickle.LONG_BINGET,
    )
)


_BROKEN = (pickle.UnpicklingError, EOFError, ValueError, IndexError, TypeError, AttributeError, OverflowError)


class _Bounded:
    """A file that never allocates more than it holds, whatever length an opcode claims."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def read(self, n: int = -1) -> bytes:
        return self._file.read(min(n, self._size) if n >= 0 else n)

    def readline(self) -> bytes:
        return self._file.readline()


# The Python form: the C one fills an array as long as the highest memo number, which a few bytes can make 4 billion.
class _Plain(pickle._Unpickler):  # type: ignore[name-defined,misc]
    dispatch: ClassVar[dict[int, Any]] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code in _PLAIN  # type: ignore[attr-defined]
    }

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"it names the outside object {pid!r}")


def load_plain(path: str | Path) -> Any:
    """What a pickle of plain data holds; Python 2's byte strings become str by latin-1.

    Raises
    ------
    DataError
        For a file that cannot be read, is too large, cut off or no pickle, and for pickles that hold anything but
        containers, strings, bytes, numbers, bools and None.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size > LARGEST:
                raise DataError(
                    f"{path} has {size:,} bytes", expected=f"at most {LARGEST:,}", fix="check which file this is"
                )
            return _Plain(_Bounded(file, size), encoding="latin1").load()
    except OSError as error:
        given = f"{path} cannot be read: {error.strerror}"
    except KeyError as error:
        given = f"{path} holds more than plain data: opcode {error}"
    except _BROKEN as error:
        given = f"{path} is no pickle of plain data: {error if str(error) else 'it breaks off'}"
    except (MemoryError, RecursionError) as error:
        given = f"{path} is nested or claims lengths beyond reason: {type(error).__name__}"
    raise DataError(
        given,
        expected="lists, dicts, strings and numbers only; nothing that runs code",
        fix="fetch the file again from its authors; do not load it with pickle.load",
    )
