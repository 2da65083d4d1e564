"""Who this process is to the store, and what it holds."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ...message import Delivery

if TYPE_CHECKING:
    from .books import Book
    from .consumer import JetStreamConsumer

#: stream and sequence: what names a message while it is stored
Key = tuple[str, int]
#: longest listing of one message (bytes)
ROW = 48


class Phase(Enum):
    """Whether a delivery is this process's: it has it, asks others whether they do, or drops it because one does."""

    HAS = 1
    ASKS = 2
    DROPS = 3


@dataclass(slots=True, eq=False)
class Place:
    """Where a delivery came from. `raw` is the server's count of deliveries, `entered` the POSIX time of the entry,
    `renewed` the monotonic time at which its lease was surely begun or renewed, `lease` how long it then lasts."""

    stream: str
    durable: str
    sequence: int
    raw: int
    reply: str
    entered: float
    consumer: JetStreamConsumer
    step: int
    lease: float
    renewed: float
    got: float
    first: float = 0.0
    before: int = 0
    ends: float = float("inf")
    data: bytes = b""
    book: Book | None = None
    #: the book says that it goes back uncounted
    returned: bool = False
    #: it is a suspect: on one of its last deliveries
    last: bool = False
    #: the record of this process names it
    recorded: bool = False
    phase: Phase = Phase.HAS
    #: the link broke since it was sure that nobody else has it
    doubt: bool = False
    #: the highest count of a delivery that others got meanwhile and asked about
    asked: int = 0

    @property
    def key(self) -> Key:
        return self.stream, self.sequence

    @property
    def overdue(self) -> bool:
        """Whether the lease may have run out."""
        return time.monotonic() - self.renewed > self.lease * 0.97

    @property
    def unsure(self) -> bool:
        """Whether another process may have it: nothing but an ack is safe before the others were asked."""
        return self.doubt or self.overdue


@dataclass(slots=True, eq=False)
class Holder:
    """One per engine and process. `held` is all that the server believes to be with this process, `handed` the part
    that its consumers were given. Both are changed in single steps, from any thread."""

    held: dict[Key, Delivery] = field(default_factory=dict)
    handed: dict[Key, Delivery] = field(default_factory=dict)
    epoch: int = 0
    base: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}")
    started: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        return f"{self.base}.{self.epoch}" if self.epoch else self.base

    def rename(self) -> None:
        """It was declared gone: it goes on under another name, with what nobody else has taken."""
        self.epoch += 1
        for delivery in list(self.held.values()):
            delivery.place.doubt = True
            delivery.place.recorded = False

    def hold(self, delivery: Delivery) -> None:
        self.held[delivery.place.key] = delivery

    def hand(self, delivery: Delivery) -> None:
        self.handed[delivery.place.key] = delivery

    def drop(self, delivery: Delivery) -> None:
        """The server does not believe any more that it is here."""
        key = delivery.place.key
        if self.held.get(key) is delivery:
            del self.held[key]

    def take_back(self, delivery: Delivery) -> None:
        """No consumer has it any more."""
        key = delivery.place.key
        if self.handed.get(key) is delivery:
            del self.handed[key]

    def of(self, consumer: JetStreamConsumer) -> list[Delivery]:
        """What came through a consumer."""
        return [each for each in list(self.held.values()) if each.place.consumer is consumer]

    def listing(self, *, settling: bool, room: int) -> tuple[list[list[Any]], list[Delivery]]:
        """What it holds, for others, in about `room` bytes of JSON at most: queue, stream, durable, and of each message
        sequence, age and count; with `settling` also what is about to leave. And what of it is listed."""
        now = time.monotonic()
        groups: dict[tuple[str, str, str], list[list[Any]]] = {}
        listed = []
        for each in list(self.held.values()):
            place = each.place
            group = each.queue, place.stream, place.durable
            room -= ROW if group in groups else ROW + 6 * sum(map(len, group))
            if room < 0:
                break
            if place.phase is not Phase.DROPS if settling else not each.settled:
                listed.append(each)
                groups.setdefault(group, []).append([place.sequence, round(now - place.got, 3), each.count])
        return [[*group, rows] for group, rows in groups.items()], listed
