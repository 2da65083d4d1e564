"""Settlements on their way: queued from any thread, sent in batches, kept until the store has answered."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from .keys import GROUP, Keys
from .scripts import script

if TYPE_CHECKING:
    from ...settings import Settings

#: acks that are sent without waiting for more, and the longest wait of fewer (seconds)
WINDOW, WINDOW_TIME = 16, 0.005
#: ids in one script call
PAGE = 500


class Settle(NamedTuple):
    """One settlement. `mode` is done, back, nack, later or dead; `extra` its delay in ms or its reason; `id` is the
    delivery's; `copy` is what dies in place of the stored message, when it is not empty."""

    mode: str
    queue: str
    id: str
    holder: str
    extra: str = ""
    copy: bytes = b""

    @property
    def step(self) -> str:
        return self.id.partition(":")[0]

    @property
    def entry(self) -> str:
        return self.id.partition(":")[2]


class Outbox:
    """Settlements of one consumer in the order of their calls. Any thread puts, whoever drives the consumer (or the
    keeper, when nobody does) takes batches, and gives back what a broken link left unanswered: all of it may be
    repeated."""

    def __init__(self) -> None:
        self._waiting: deque[Settle] = deque()
        self._since = 0.0
        self._urgent = False
        #: who drives the consumer knows that some wait
        self._told = False

    def put(self, settle: Settle) -> bool:
        """Whether who drives the consumer has to hear of it: one starts the time, later ones may end it."""
        if not self._waiting:
            self._since = time.monotonic()
        if settle.mode != "done":
            self._urgent = True
        self._waiting.append(settle)
        if self._told and not self._urgent and len(self._waiting) < WINDOW:
            return False
        self._told = True
        return True

    def __len__(self) -> int:
        return len(self._waiting)

    def due(self, now: float) -> float | None:
        """Seconds until they should go; None when there are none."""
        if not self._waiting:
            return None
        if self._urgent or len(self._waiting) >= WINDOW:
            return 0.0
        return max(0.0, self._since + WINDOW_TIME - now)

    def take(self) -> list[Settle]:
        self._urgent = self._told = False
        waiting, batch = self._waiting, []
        try:
            while True:
                batch.append(waiting.popleft())
        except IndexError:
            return batch

    def give_back(self, settles: Iterable[Settle]) -> None:
        settles = list(settles)
        if settles:
            self._waiting.extendleft(reversed(settles))
            self._since = time.monotonic()


class Packer:
    """Settlements to commands."""

    def __init__(self, keys: Keys, settings: Settings, limit_of: Callable[[str], int]) -> None:
        self._keys = keys
        self._settings = settings
        self._limit_of = limit_of
        self._done: dict[tuple[str, str, str], tuple[int, bytes]] = {}

    def pack(self, batch: list[Settle]) -> list[tuple[bytes, list[Settle]]]:
        """Commands with what each of them settles, in an order that keeps each message's own."""
        groups: dict[tuple[object, ...], list[Settle]] = {}
        for settle in batch:
            if settle.mode == "done":
                groups.setdefault((settle.queue, settle.step, settle.holder), []).append(settle)
            else:
                groups.setdefault(settle[:2] + settle[3:], []).append(settle)
        commands = []
        for rows in groups.values():
            for start in range(0, len(rows), PAGE):
                part = rows[start:start + PAGE]
                command = self._done_command(part) if part[0].mode == "done" else self._settle_command(part)
                commands.append((command, part))
        return commands

    def _done_command(self, rows: list[Settle]) -> bytes:
        first = rows[0]
        place = (first.queue, first.step, first.holder)
        prepared = self._done.get(place)
        if prepared is None:
            keys = [self._keys.stream(first.queue, int(first.step)), f"{self._keys.root(first.queue)}:trial",
                    self._keys.bell(first.queue)]
            prepared = script("done").prepared(keys, GROUP, first.holder)
            self._done[place] = prepared
        words, head = prepared
        parts = [b"*%d\r\n" % (words + len(rows)), head]
        for row in rows:
            entry = row.entry.encode()
            parts.append(b"$%d\r\n%b\r\n" % (len(entry), entry))
        return b"".join(parts)

    def _settle_command(self, rows: list[Settle]) -> bytes:
        first = rows[0]
        pairs = [word for row in rows for word in (row.step, row.entry)]
        return script("settle").call(
            self._keys.whole(first.queue), GROUP, first.holder, first.mode, self._limit_of(first.queue), first.extra,
            self._settings.dead_letter_max_count, int(self._settings.dead_letter_max_age * 1000), first.copy,
            *pairs)

