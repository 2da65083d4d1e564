"""A proxy that counts what a client asks of its store, so that a test can end the client between any two of its steps.

Whatever an operation is made of, the store only knows of it what it is asked: a process that is killed between two
steps of its own has sent so many requests, and not the next one. So a test that ends it after 0, 1, 2, ... requests,
until the operation gets to its end, has been at each place where a kill makes a difference, also at those that somebody
adds later.

    with Steps(server.port, redis_requests) as steps:
        client = start_process(server.url(port=steps.port))
        steps.allow(2)                      # from here on
        ask_for_something(client)
        third = steps.wait_stopped()        # what it was about to ask
        client.kill()
        steps.forget()                      # what was kept back is never sent
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Iterator
from typing import TypeAlias

from .faults import Link, Proxy

#: takes whole requests off the front of what has come; each with whether it is a step
Split: TypeAlias = Callable[[bytearray], Iterator[tuple[bytes, bool]]]


def redis_requests(buffer: bytearray) -> Iterator[tuple[bytes, bool]]:
    """Commands of Redis' protocol; each is a step (a script is one, it runs whole or not at all)."""
    while (end := _end_of_command(buffer)) >= 0:
        yield bytes(buffer[:end]), True
        del buffer[:end]


def _end_of_command(buffer: bytearray) -> int:
    """-1 when it is not whole."""
    line = buffer.find(b"\r\n")
    if line < 0:
        return -1
    place = line + 2
    for _ in range(int(buffer[1:line])):
        line = buffer.find(b"\r\n", place)
        if line < 0:
            return -1
        place = line + 2 + int(buffer[place + 1:line]) + 2
    return place if place <= len(buffer) else -1


def nats_requests(buffer: bytearray) -> Iterator[tuple[bytes, bool]]:
    """Operations of the NATS protocol; what is published is a step, be it a message, an acknowledgement or a request
    to the JetStream API."""
    while (line := buffer.find(b"\r\n")) >= 0:
        end = line + 2
        words = bytes(buffer[:line]).split()
        step = bool(words) and words[0].upper() in (b"PUB", b"HPUB")
        if step:
            end += int(words[-1]) + 2
        if end > len(buffer):
            return
        yield bytes(buffer[:end]), step
        del buffer[:end]


class Steps(Proxy):
    """Lets everything through until `allow`. Methods may be called from any thread."""

    def __init__(self, target: int | tuple[str, int], split: Split) -> None:
        self._split = split
        self._begun: weakref.WeakKeyDictionary[Link, bytearray] = weakref.WeakKeyDictionary()
        self._left: int | None = None
        self._kept: list[bytes] = []
        self._forgotten = False
        super().__init__(target)

    def allow(self, requests: int) -> None:
        """From now on so many more get through, of all connections together; the next ones are kept back."""
        with self._changed:
            self._left = requests

    def wait_stopped(self, timeout: float = 10.0) -> bytes:
        """Until a request is kept back: its beginning. AssertionError after `timeout` seconds."""
        self._wait(lambda: bool(self._kept), timeout, "a request that is kept back")
        return self._kept[0]

    @property
    def stopped(self) -> bool:
        """Whether a request is, or was, kept back."""
        with self._changed:
            return bool(self._kept)

    def forget(self) -> None:
        """End all connections; what was kept back never gets to the server."""
        with self._changed:
            self._forgotten = True
            self._changed.notify_all()
        self._end_all(reset=False)

    def _forward(self, link: Link, way: str, data: bytes, sink: socket.socket) -> bool:
        if way == "down":
            return super()._forward(link, way, data, sink)
        with self._changed:
            begun = self._begun.setdefault(link, bytearray())
        begun += data
        return all(self._may_pass(request, step) and super(Steps, self)._forward(link, way, request, sink)
                   for request, step in self._split(begun))

    def _may_pass(self, request: bytes, step: bool) -> bool:
        """False when it was kept back and is forgotten."""
        with self._changed:
            if step and self._left is not None:
                if not self._left:
                    self._kept.append(request[:200])
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed or self._forgotten)
                    return False
                self._left -= 1
            return not self._forgotten
