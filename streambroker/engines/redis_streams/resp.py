"""RESP2, the wire format: commands to bytes, and a reader of replies (hiredis' where it is installed)."""

from __future__ import annotations

import re
from typing import Any, Protocol

#: what Redis before 7 puts before the error of a command inside a script
_WRAPPING = re.compile(r"^(?:ERR Error running script \(call to \w+\): )?(?:@user_script: ?\d+: )+-?(?=[A-Z]{3,} )")


class ReplyError(Exception):
    """The server's own error text, e.g. `WRONGTYPE Operation against ...`. Replies are handed over with it inside."""

    def __init__(self, text: str) -> None:
        super().__init__(_WRAPPING.sub("", text))


class Reader(Protocol):
    def feed(self, data: bytes) -> None: ...

    def gets(self) -> Any:
        """The next whole reply, or False when there is none (no RESP2 reply is False)."""


class PythonReader:
    """The same interface as hiredis.Reader, for machines without it: three to five times slower."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def gets(self) -> Any:
        try:
            reply, end = self._parse(0)
        except _Incomplete:
            return False
        del self._buffer[:end]
        return reply

    def _parse(self, start: int) -> tuple[Any, int]:
        line_end = self._buffer.find(b"\r\n", start)
        if line_end < 0:
            raise _Incomplete
        kind, rest, end = self._buffer[start:start + 1], bytes(self._buffer[start + 1:line_end]), line_end + 2
        if kind == b"+":
            return rest, end
        if kind == b"-":
            return ReplyError(rest.decode(errors="replace")), end
        if kind == b":":
            return int(rest), end
        size = int(rest)
        if size < 0:
            return None, end
        if kind == b"$":
            if len(self._buffer) < end + size + 2:
                raise _Incomplete
            return bytes(self._buffer[end:end + size]), end + size + 2
        if kind != b"*":
            raise ValueError(f"no RESP2 reply starts with {bytes(kind)!r}")
        items = []
        for _ in range(size):
            item, end = self._parse(end)
            items.append(item)
        return items, end


class _Incomplete(Exception):
    pass


def make_reader() -> Reader:
    try:
        from hiredis import Reader as HiredisReader
    except ImportError:
        return PythonReader()
    reader: Reader = HiredisReader(replyError=ReplyError)
    return reader


Word = bytes | str | int | float


def text_of(data: bytes) -> str:
    """What `pack` turns into these bytes again, whatever they are."""
    return data.decode("utf-8", "surrogateescape")


def pack(*words: Word) -> bytes:
    """One command."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode("utf-8", "surrogateescape")
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def pack_words(*words: Word) -> bytes:
    """The words of a command without its count, for a prepared beginning."""
    parts = []
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode("utf-8", "surrogateescape")
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)
