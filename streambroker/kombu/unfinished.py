"""Publishes that had reached some of their queues when the link broke. Kombu repeats them as a whole, after it has
closed the connection for the error, so the process remembers them.
"""

from __future__ import annotations

import hashlib
import os

from ..message import Message

#: how many are remembered; the oldest go first
MOST = 1000

_stored: dict[bytes, set[str]] = {}
os.register_at_fork(after_in_child=_stored.clear)


def resume(store: str, exchange: str, routing_key: str, message: Message) -> set[str]:
    """Queues that have this message from an earlier try."""
    return _stored.pop(_mark(store, exchange, routing_key, message), set()) if _stored else set()


def note(store: str, exchange: str, routing_key: str, message: Message, queues: set[str]) -> None:
    """A try ended early; these queues have the message."""
    if len(_stored) >= MOST:
        _stored.pop(next(iter(_stored)), None)
    _stored[_mark(store, exchange, routing_key, message)] = queues


def _mark(*parts: str | Message) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        for data in (part.head, part.body) if isinstance(part, Message) else (part.encode("utf-8", "surrogatepass"),):
            digest.update(b"%d\n" % len(data))
            digest.update(data)
    return digest.digest()
