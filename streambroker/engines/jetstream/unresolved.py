"""Publishes of unknown outcome, of this process. A framework that repeats one comes with the same content: it gets the
same ids, and the server knows whether it has the messages."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from ...message import Message
from .frames import Frame

#: how many are remembered
MOST = 1000

#: by store and prefix: a framework may repeat a publish after it has closed its engine for the error
_memories: dict[tuple[str, str], dict[bytes, tuple[Sequence[Frame], float]]] = {}


class Unresolved:
    """Of one store and prefix. Thread-safe: single steps of a dict."""

    def __init__(self, store: str, prefix: str) -> None:
        self._known = _memories.setdefault((store, prefix), {})

    def take(self, queue: str, messages: Sequence[Message], window: float) -> tuple[Sequence[Frame], float] | None:
        """(frames, monotonic time of the first try) of the same publish, when the server recognizes it for `window`
        seconds from then on."""
        if not self._known:
            return None
        known = self._known.pop(_digest(queue, messages), None)
        return known if known is not None and time.monotonic() - known[1] < window else None

    def keep(self, queue: str, messages: Sequence[Message], frames: Sequence[Frame], began: float) -> None:
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[_digest(queue, messages)] = frames, began


def _digest(queue: str, messages: Sequence[Message]) -> bytes:
    """Of what is the same in a repetition: a delay may have become shorter."""
    digest = hashlib.sha256(queue.encode("utf-8", "surrogateescape"))
    for message in messages:
        for part in (message.id.encode("utf-8", "surrogateescape"), message.head, message.body):
            digest.update(b"%d:" % len(part))
            digest.update(part)
        digest.update(b"%d;" % message.priority)
    return digest.digest()
