"""Pickles byte by byte as Python 2 wrote them, which pickle.dumps does not make."""

import struct


def python2_pickle(value):
    """Protocol 2 as Python 2 wrote it: str as SHORT_BINSTRING or BINSTRING, unicode as BINUNICODE, memo after each."""
    out = [b"\x80\x02"]
    count = 0

    def memo():
        nonlocal count
        out.append(b"q" + bytes([count]) if count < 256 else b"r" + struct.pack("<I", count))
        count += 1

    def emit(item):
        if item is None:
            out.append(b"N")
        elif isinstance(item, bool):
            out.append(b"\x88" if item else b"\x89")
        elif isinstance(item, int):
            out.append(b"K" + bytes([item]) if 0 <= item < 256 else b"J" + struct.pack("<i", item))
        elif isinstance(item, float):
            out.append(b"G" + struct.pack(">d", item))
        elif isinstance(item, str):  # Python 2's unicode
            data = item.encode()
            out.append(b"X" + struct.pack("<I", len(data)) + data)
            memo()
        elif isinstance(item, bytes):  # Python 2's str
            out.append((b"U" + bytes([len(item)]) if len(item) < 256 else b"T" + struct.pack("<i", len(item))) + item)
            memo()
        elif isinstance(item, list):
            out.append(b"]")
            memo()
            out.append(b"(")
            for one in item:
                emit(one)
            out.append(b"e")
        elif isinstance(item, dict):
            out.append(b"}")
            memo()
            out.append(b"(")
            for key, one in item.items():
                emit(key)
                emit(one)
            out.append(b"u")
        else:
            raise TypeError(type(item))

    emit(value)
    return b"".join(out) + b"."


def _text(value):
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"I01\n" if value else b"I00\n"
    if isinstance(value, int):
        return b"I%d\n" % value
    if isinstance(value, float):
        return b"F%r\n" % value
    if isinstance(value, bytes):
        return b"S'" + value.replace(b"'", b"\\'") + b"'\n"
    if isinstance(value, list):
        return b"(l" + b"".join(_text(v) + b"a" for v in value)
    return b"(d" + b"".join(_text(k) + _text(v) + b"s" for k, v in value.items())


def python2_text_pickle(value):
    """Protocol 0, Python 2's default: lines of text, str in quotes."""
    return _text(value) + b"."


def as_python2(value):
    """The same with str as Python 2's byte strings."""
    if isinstance(value, str):
        return value.encode("latin1")
    if isinstance(value, list):
        return [as_python2(v) for v in value]
    return {as_python2(k): as_python2(v) for k, v in value.items()} if isinstance(value, dict) else value
