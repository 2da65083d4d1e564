"""What travels: messages, deliveries, dead letters, and what is counted of them.

Times are float seconds. Nothing here knows a store or a framework.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Message(NamedTuple):
    """What is published.

    `head` is a JSON object that the adapter writes (content type, headers, properties) and engines never read;
    `type` in it names the task for people. `priority` is a step, 0 is served first. `delay` and `expires` count from
    the publish, by the store's clock, so that a publisher's wrong clock does not matter. `id` is the framework's
    name for the job; it need not be unique (a retry keeps it).
    """

    body: bytes
    head: bytes = b"{}"
    id: str = ""
    priority: int = 0
    delay: float = 0.0
    expires: float | None = None

    @property
    def headers(self) -> dict[str, Any]:
        """`head` parsed; empty when it is no JSON object."""
        try:
            parsed = json.loads(self.head)
        except ValueError:
            return {}
        return parsed if isinstance(parsed, dict) else {}


def printable(text: str) -> str:
    """`text` without halves of surrogate pairs, which no store can keep: what is wrong with a message is told with
    parts of it."""
    return text.encode("utf-8", "backslashreplace").decode()


@dataclass(slots=True, eq=False)
class Delivery:
    """One hand-over of a message to one consumer.

    `count` is 1 the first time and includes lost leases and rejects with requeue. `redelivered` is also true for a
    message that came back uncounted. `replayed` is true for what was a dead letter and was put back. `lost` tells that
    it is not this consumer's any more, `taken` that others have, or had, it since: a store that loses everything takes
    it from all. `token` orders the hand-overs of one message: a later one is greater.
    """

    queue: str
    id: str
    message: Message
    count: int = 1
    redelivered: bool = False
    #: the engine's own way back to the entry
    place: Any = field(default=None, repr=False)
    settled: bool = field(default=False, repr=False)
    lost: bool = field(default=False, repr=False)
    taken: bool = field(default=False, repr=False)
    replayed: bool = False

    def take_away(self) -> None:
        """Others have it."""
        self.lost = self.taken = True

    @property
    def token(self) -> tuple[str, int]:
        """Fencing token: (id, count)."""
        return self.id, self.count


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that nobody gets any more, with why. `first` and `last` are POSIX times of the first publish and of
    the burial; `holder` is who had it last."""

    queue: str
    id: str
    message: Message
    reason: str
    count: int
    first: float
    last: float
    holder: str = ""
    fields: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Delayed:
    """A message that waits for its time. `due` is a POSIX time by the store's clock."""

    queue: str
    id: str
    message: Message
    due: float


@dataclass(frozen=True, slots=True)
class InFlight:
    """One unsettled delivery, as seen from outside. `age` is the time since the hand-over."""

    queue: str
    id: str
    holder: str
    age: float
    count: int


@dataclass(frozen=True, slots=True)
class Holding:
    """What one holder has of a queue."""

    holder: str
    count: int
    oldest_age: float
    max_delivery_count: int


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Counts of one queue. `oldest_age` is the age of the oldest ready message, None when there is none."""

    queue: str
    ready: int
    delayed: int
    in_flight: int
    dead: int
    oldest_age: float | None = None
    durable: bool = True
    holders: tuple[Holding, ...] = ()


@dataclass(frozen=True, slots=True)
class Worker:
    """One consuming process. `seen` is the age of its last sign of life."""

    holder: str
    host: str
    pid: int
    queues: tuple[str, ...]
    lease: float
    seen: float


@dataclass(frozen=True, slots=True)
class QueueSpec:
    """How a queue behaves.

    A transient queue (`durable=False`) buffers from its declaration on and is gone, with its bindings, after
    `expires` seconds without a consumer, a read or a new declaration. `message_ttl` in seconds drops older messages
    unread (None: never). `delivery_limit`: None follows the engine's option, 0 is off. `max_length` drops the oldest
    ready messages beyond it. `arguments` keeps what the adapter was given.
    """

    name: str
    durable: bool = True
    expires: float | None = None
    message_ttl: float | None = None
    delivery_limit: int | None = None
    max_length: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
