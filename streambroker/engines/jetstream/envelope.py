"""How a message lies in a stream: a short binary head of fixed size, then id, head and body as they are.

Everything that must survive a move to another place (a delay, a dead letter, a replay) is inside; headers of NATS carry
only what the server reads.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ...message import Message

#: mark, version and flags, step, deliveries before this copy, first publish, due time and life in ms, lengths of id and
#: head
_FIXED = struct.Struct(">2sBBIqqqII")
_MARK = b"SB"
_VERSION = 1
_RETURNED, _REPLAYED = 0x80, 0x40
_FLAGS = _RETURNED | _REPLAYED
FOREVER = -1


class Envelope(NamedTuple):
    """`first` is the POSIX time in ms of the first publish by the server's clock, 0: the time of the entry itself.
    `due`, the same, is when it may be handed out at the earliest. `before` counts the deliveries of earlier copies,
    `returned` tells whether it was delivered before, `replayed` whether it was a dead letter."""

    message: Message
    first: int = 0
    before: int = 0
    returned: bool = False
    due: int = 0
    replayed: bool = False

    def encode(self) -> bytes:
        message = self.message
        name = message.id.encode("utf-8", "surrogateescape")
        life = FOREVER if message.expires is None else max(0, int(message.expires * 1000))
        flags = _VERSION | (_RETURNED if self.returned else 0) | (_REPLAYED if self.replayed else 0)
        head = _FIXED.pack(_MARK, flags, message.priority, self.before, self.first, self.due, life, len(name),
                           len(message.head))
        return b"".join((head, name, message.head, message.body))


def decode(data: bytes) -> Envelope:
    """Raises ValueError when it is none of ours."""
    try:
        mark, flags, step, before, first, due, life, name, head = _FIXED.unpack_from(data)
    except struct.error as error:
        raise ValueError("too short to be one of our messages") from error
    start = _FIXED.size
    if mark != _MARK or flags & ~_FLAGS != _VERSION or len(data) < start + name + head:
        raise ValueError("not one of our messages")
    middle = start + name
    end = middle + head
    message = Message(data[end:], data[middle:end], data[start:middle].decode("utf-8", "surrogateescape"), step, 0.0,
                      None if life == FOREVER else life / 1000)
    return Envelope(message, first, before, bool(flags & _RETURNED), due, bool(flags & _REPLAYED))
