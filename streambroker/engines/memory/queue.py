"""One queue of the model: what waits, what is out, and who may have what next."""

from __future__ import annotations

import heapq
import os
import socket
import uuid
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

from ...message import Delivery, Message, QueueSpec
from ...settings import Settings


@dataclass(slots=True, eq=False)
class Holder:
    """The owner of leases: one engine object."""

    settings: Settings
    name: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    #: queue name to how many of this holder's consumers consume it
    consuming: dict[str, int] = field(default_factory=dict)
    #: when it gave its last sign of life; None while it lives
    died: float | None = None


@dataclass(slots=True, eq=False)
class Entry:
    """A stored message. The last three fields describe the present hand-over."""

    id: str
    message: Message
    seq: int
    first: float
    ends: float
    entered: float
    count: int = 0
    returned: bool = False
    replayed: bool = False
    holder: Holder | None = None
    delivery: Delivery | None = None
    since: float = 0.0

    @property
    def place(self) -> tuple[int, int]:
        return self.message.priority, self.seq


@dataclass(frozen=True, slots=True)
class Trial:
    """A last-chance message that is out. Until its time is over the holder gets no other such message, and nothing at
    all when it is `strict`."""

    entry: Entry
    strict: bool
    until: float


@dataclass(frozen=True, slots=True)
class Choice:
    """What a holder gets next. `last`: it is its last chance; `strict`: which it must have alone. `waits`: nothing,
    until the holder is empty and can have such a message alone."""

    entry: Entry | None = None
    last: bool = False
    strict: bool = False
    waits: bool = False


class Queue:
    """`ready` is sorted by place, so that whatever comes back is where it was, `again` are those of it that were
    delivered before; `held` is by holder, in hand-out order; `trials` are the last-chance messages that are out, at
    most one for each holder, `waits` until when holders empty themselves for one, `long` something of those who did so
    in vain."""

    def __init__(self, spec: QueueSpec, touched: float) -> None:
        self.spec = spec
        self.touched = touched
        self.ready: list[Entry] = []
        self.again: set[Entry] = set()
        self.delayed: list[tuple[float, int, Entry]] = []
        self.held: dict[Holder, dict[Entry, None]] = {}
        self.trials: dict[Holder, Trial] = {}
        self.waits: dict[Holder, float] = {}
        self.long: dict[Holder, Entry] = {}

    def waiting(self) -> int:
        return len(self.ready) + len(self.delayed)

    def unsettled(self) -> list[Entry]:
        return [entry for entries in self.held.values() for entry in entries]

    # What is ready

    def put(self, entry: Entry) -> None:
        insort(self.ready, entry, key=lambda each: each.place)
        if entry.count:
            self.again.add(entry)

    def take_out(self, entry: Entry) -> None:
        self.ready.remove(entry)
        self.again.discard(entry)

    def keep(self, wanted: Callable[[Entry], bool]) -> None:
        """Drop ready messages."""
        self.ready = [entry for entry in self.ready if wanted(entry)]
        self.again.intersection_update(self.ready)

    def expire(self, now: float) -> None:
        """Drop what is older than it may be."""
        ttl = float("inf") if self.spec.message_ttl is None else self.spec.message_ttl
        self.keep(lambda entry: now < min(entry.ends, entry.entered + ttl))

    # What waits for its time

    def delay(self, entry: Entry, due: float) -> None:
        heapq.heappush(self.delayed, (due, entry.seq, entry))

    def drop_delayed(self, unwanted: Callable[[Entry], bool]) -> int:
        """Remove delayed messages; how many."""
        kept = [item for item in self.delayed if not unwanted(item[2])]
        dropped = len(self.delayed) - len(kept)
        self.delayed = kept
        heapq.heapify(self.delayed)
        return dropped

    # Who may have what

    def limit(self, holder: Holder) -> int:
        own = self.spec.delivery_limit
        return (holder.settings.delivery_limit if own is None else own) or 0

    def last_chance(self, entry: Entry, holder: Holder) -> bool:
        """A lost worker convicts only a message on its last allowed delivery that it had alone. So such messages are
        handed out one at a time to each holder, and one that was lost in company next time without any: its count is
        at the limit then. With a limit of four and more the last delivery but one is such a chance too, so that a kill
        from outside convicts nobody. A message that was never lost or rejected is above suspicion."""
        limit = self.limit(holder)
        return limit > 0 and entry.count >= (limit - 2 if limit >= 4 else max(1, limit - 1))

    def choose(self, holder: Holder, now: float) -> Choice:
        """What `holder` would get now: of the first step that has something a last chance, else the oldest message."""
        held, waits = self.held.get(holder), self.waits.get(holder)
        # a long one is not waited for again: many suspects behind it would take as many times as long
        lapsed = waits is not None and waits <= now or bool(held and self.long.get(holder) in held)
        if waits is not None and held and not lapsed:
            return Choice(waits=True)
        trial = self.trials.get(holder)
        if trial and trial.until <= now:
            trial = None
        if trial and trial.strict:
            return Choice()
        suspects = sorted((each for each in self.again if self.last_chance(each, holder)), key=lambda each: each.place)
        for step, entries in groupby(self.ready, lambda each: each.message.priority):
            if not trial:
                waits = False
                for suspect in [each for each in suspects if each.message.priority == step]:
                    alone = suspect.count >= self.limit(holder) and not lapsed
                    if not (alone and held):
                        return Choice(suspect, last=True, strict=alone)
                    waits = True
                if waits and not any(till > now for other, till in self.waits.items() if other is not holder):
                    return Choice(waits=True)
            plain = next((entry for entry in entries if entry not in suspects), None)
            if plain:
                return Choice(plain)
        return Choice()

    def wait(self, holder: Holder, choice: Choice, now: float, till: float) -> None:
        """Note whether `holder` gets nothing until it is empty, `till` then at most."""
        if choice.waits:
            self.waits.setdefault(holder, till)
            return
        held = self.held.get(holder)
        if self.waits.pop(holder, float("inf")) <= now and held:
            self.long[holder] = next(iter(held))

    def forget(self, holder: Holder) -> None:
        """It is gone."""
        self.waits.pop(holder, None)
        self.long.pop(holder, None)
