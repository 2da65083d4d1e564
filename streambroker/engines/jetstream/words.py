"""What a server says, read as it arrives: between the socket and us there is no stream, no queue and no task. That is
most of what a message cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

#: (sid, subject, reply, data, header block or None): what a message brings
Deliver = Callable[[int, bytes, bytes, bytes, "bytes | None"], None]
#: (operation, rest of its line)
Hear = Callable[[bytes, bytes], None]


class Words(asyncio.Protocol):
    """In the loop's thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Deliver, hear: Hear) -> None:
        self._loop = loop
        self._deliver = deliver
        self._hear = hear
        #: the beginning of something, and how long it is at least
        self._begun = bytearray()
        self._needed = 0
        self._reading = False
        self._after: list[Callable[[], None]] = []
        #: whether something that is to be sent waits for the socket
        self.full = False
        #: monotonic time of the last word
        self.heard = time.monotonic()
        #: ends with the connection, whatever ends it
        self.ended: asyncio.Future[None] = loop.create_future()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False

    def call_next(self, callback: Callable[[], None]) -> None:
        """Call it when everything that was read with the present message is handled."""
        if self._reading:
            self._after.append(callback)
        else:
            self._loop.call_soon(callback)

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        if self._begun:
            self._begun += data
            if len(self._begun) < self._needed:
                return
            data = bytes(self._begun)
            self._begun.clear()
        self._reading = True
        try:
            read = self._read(data)
            if read < len(data):
                self._begun += memoryview(data)[read:]
        finally:
            # also before an end: those who wait for it would wait for ever
            self._reading = False
            if self._after:
                after, self._after = self._after, []
                for callback in after:
                    callback()

    def _read(self, data: bytes) -> int:
        """Handle all that is whole; where the rest begins."""
        start = 0
        self._needed = 0
        while (end := data.find(b"\r\n", start)) >= 0:
            headed = data.startswith(b"HMSG ", start)
            if not headed and not data.startswith(b"MSG ", start):
                operation, _, rest = data[start:end].partition(b" ")
                self._hear(operation.upper(), rest)
                start = end + 2
                continue
            # [H]MSG <subject> <sid> [reply] [header bytes] <bytes>
            words = data[start:end].split()
            size, body = int(words[-1]), end + 2
            if size < 0:
                raise ValueError(f"a message of {size} bytes")
            if len(data) < body + size + 2:
                self._needed = body + size + 2 - start
                break
            if headed:
                head = body + int(words[-2])
                reply = words[3] if len(words) == 6 else b""
                self._deliver(int(words[2]), words[1], reply, data[head:body + size], data[body:head])
            else:
                reply = words[3] if len(words) == 5 else b""
                self._deliver(int(words[2]), words[1], reply, data[body:body + size], None)
            start = body + size + 2
        return start
