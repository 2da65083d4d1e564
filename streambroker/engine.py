"""THE SEAM between stores and frameworks. Private: reshaped whenever both engines and both adapters read better.

Rules that every engine keeps, and that the conformance suite in `streambroker.testing` checks:

* A publish that returned is stored. One whose reply was lost is repeated inside the engine: never two, never none.
* A message is with one consumer at a time. Its lease belongs to the *holder*, the process: while the holder gives
  signs of life (the keeper's real thread, no event loop), nothing that it holds goes elsewhere, started or not.
* Settle calls come from any thread or greenlet, never block for long, never raise, are idempotent, survive a replaced
  connection and a closed consumer, and are no-ops (one debug line) when the lease was lost. They may be sent later,
  bounded by some 10 ms while something drives the consumer and by the keeper otherwise. `ack_now` alone waits.
* A settled delivery frees its credit at once. `limit` of `receive` bounds what is asked of the store: never more is
  fetched than the caller has room for.
* Nothing is sent, settled or handed back from a forked child; the child makes its own engine.
* `close()` may be called twice.
* Errors are those of `streambroker.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .message import DeadLetter, Delayed, Delivery, InFlight, Message, QueueSpec, QueueStats, Worker


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do beyond the rules. `strict_priority`: no message of a later step is handed out while one of
    an earlier step is ready. `in_order_hand_back`: a message given back keeps its place."""

    name: str
    strict_priority: bool = True
    in_order_hand_back: bool = True
    persistent: bool = True


class Consumer(Protocol):
    """Receives deliveries of some queues. One thread or greenlet at a time calls `receive`; settling is free."""

    def add(self, queue: str) -> None:
        """Also consume `queue`."""

    def discard(self, queue: str) -> None:
        """Stop consuming `queue`: nothing more is fetched from it, what was fetched and not yet received goes back."""

    def receive(self, timeout: float, limit: int = 1) -> list[Delivery]:
        """Up to `limit` deliveries; limit 0 only sends what is due (acks) and keeps things going.

        `timeout=0` never waits: it sends acks, asks for more when there is room, and returns what has arrived, so it
        must be called again when one of `sources()` is readable. `timeout>0` waits until something has arrived.
        A broken link is mended inside, without waiting, for `reconnect_timeout` seconds; then StoreConnectionError.
        """

    def fetch(self, limit: int = 1) -> list[Delivery]:
        """What is ready now, up to `limit`: one round trip, no waiting for messages."""

    def sources(self) -> Sequence[int]:
        """File descriptors: when one is readable, `receive(0)` may return something. They change when a link is
        replaced, so ask again after each `receive`."""

    def due(self) -> float | None:
        """Seconds until `receive` should be called even if no source is readable (held acks, a reconnect)."""

    def ack(self, delivery: Delivery) -> None:
        """Done: the message leaves the store."""

    def ack_now(self, delivery: Delivery) -> None:
        """The same, and it has left when this returns; threads that wait share their requests. StoreConnectionError
        after `publish_timeout`, or StoreError: the delivery is not settled then, and this may be called again."""

    def nack(self, delivery: Delivery, delay: float = 0.0) -> None:
        """Again, counted: at its old place, or after `delay` seconds. Past the delivery limit: dead letter."""

    def hand_back(self, deliveries: Collection[Delivery]) -> None:
        """Give unstarted deliveries back at once: uncounted, at their old place."""

    def dead_letter(self, delivery: Delivery, reason: str, message: Message | None = None) -> None:
        """Give up: to the dead-letter queue, with the reason, and with `message` in place of what was delivered, its
        priority excepted. A `message` that has grown too large for the store is left out."""

    def close(self, keep: Collection[Delivery] = ()) -> None:
        """Flush acks and hand back everything unsettled, except `keep`: those stay owned (their lease is kept by the
        engine) and can still be settled through this closed consumer."""


class Subscription(Protocol):
    """Live copies of what is broadcast from `add` on; nothing is stored for it. Same driving rules as Consumer."""

    def add(self, topic: str, pattern: str = "") -> None:
        """Listen to `topic` before returning. `pattern` filters keys: empty takes all, `*` one word, `#` any words."""

    def discard(self, topic: str, pattern: str = "") -> None: ...

    def receive(self, timeout: float) -> list[tuple[str, str, Message]]:
        """(topic, key, message) of what has arrived; see Consumer.receive for timeouts and errors."""

    def sources(self) -> Sequence[int]: ...

    def due(self) -> float | None: ...

    def close(self) -> None: ...


class SharedTable(Protocol):
    """A small table that all processes share. Rows are text. Reads are cached and cost one look at a version."""

    def rows(self, max_age: float = 0.0, *, patient: bool = True) -> Mapping[str, str]:
        """All rows, at most `max_age` seconds old; 0 looks at the store's version each time. Without `patient` it
        raises soon when the store cannot be reached."""

    def put(self, key: str, value: str, queue: str = "") -> bool:
        """Set a row; True when it changed. With `queue` the row goes when that transient queue goes."""

    def delete(self, keys: Collection[str]) -> int:
        """Remove rows; how many there were."""


class Inspector(Protocol):
    """Looking and steering, for tools; never used by a hot path. Methods take plain queue names."""

    def queues(self) -> list[str]:
        """Names of all queues that are declared or hold something, sorted."""

    def stats(self, queue: str) -> QueueStats: ...

    def in_flight(self, queue: str, limit: int = 1000) -> list[InFlight]: ...

    def workers(self) -> list[Worker]: ...

    def dead(self, queue: str) -> Iterator[DeadLetter]:
        """Oldest first."""

    def dead_remove(self, queue: str, ids: Collection[str]) -> int: ...

    def replay(self, queue: str, ids: Collection[str]) -> int:
        """Put dead letters back into their queue, as new deliveries. None is lost, nor copied when a replay that was
        broken off is repeated soon."""

    def delayed(self, queue: str) -> Iterator[Delayed]:
        """In no particular order."""

    def delayed_remove(self, queue: str, ids: Collection[str]) -> int: ...

    def drop(self, message_ids: Collection[str], queues: Collection[str] | None = None) -> int:
        """Remove waiting (delayed) messages whose `Message.id` is one of these; how many. Many ids cost one pass."""

    def purge(self, queue: str) -> int:
        """Remove ready and delayed messages, never unsettled ones; how many."""


class Engine(Protocol):
    """A store. Thread-safe. Made by `streambroker.connect`; belongs to the process that made it."""

    @property
    def capabilities(self) -> Capabilities: ...

    def declare(self, queue: QueueSpec) -> None:
        """Make it, or refresh a transient one's time. Idempotent; a changed spec replaces the old one."""

    def spec(self, queue: str) -> QueueSpec | None:
        """As declared by anyone; None when nobody did."""

    def delete(self, queue: str, *, if_unused: bool = False, if_empty: bool = False) -> int:
        """Remove the queue, its dead letters excepted; how many ready and delayed messages went with it. -1 when a
        condition did not hold."""

    def consumers(self, queue: str) -> int:
        """Live holders that consume it."""

    def ready(self, queue: str) -> int:
        """Messages that could be delivered now."""

    def publish(self, queue: str, messages: Sequence[Message], *, create: bool = True) -> list[str]:
        """Store all; ids are receipts. With `create=False` a queue that is not there (an expired reply queue) takes
        nothing: an empty list. Raises MessageTooLarge, StoreError, StoreConnectionError."""

    def flush(self) -> None:
        """Wait for what `confirm="deferred"` left open; raises what went wrong."""

    def consume(self, queues: Sequence[str], *, no_ack: bool = False) -> Consumer:
        """`no_ack`: forgotten by the store on delivery."""

    def broadcast(self, topic: str, message: Message, key: str = "") -> None:
        """To whoever listens now; stores nothing. Raises soon when the store cannot be reached."""

    def subscribe(self) -> Subscription: ...

    def table(self, name: str) -> SharedTable: ...

    def inspector(self) -> Inspector: ...

    def forward_dead_letters(self, queue: str, forward: Callable[[DeadLetter], bool]) -> None:
        """Each dead letter of `queue` that a consumer of this process sees is given to `forward`; when that returns
        True (it stored it elsewhere) the dead letter is removed."""

    def watch_convictions(self, queue: str, tell: Callable[[DeadLetter], None]) -> None:
        """Each message of `queue` that this process finds guilty of the deaths of its workers (delivery limit) is told,
        once, by the thread that drives a consumer."""

    def ping(self, timeout: float = 5.0) -> float:
        """Round trip in seconds; raises StoreConnectionError."""

    def close(self, keep: Collection[Delivery] = ()) -> None:
        """Flush, hand everything back, end threads and connections. What is in `keep` still runs in this process:
        others may have it when its death is proved or the lease is over."""
