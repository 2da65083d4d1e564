"""Who this process is to the store, and what it holds."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass

from ...message import Delivery
from .settles import Settle

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mark:
    """In the place of a delivery: settled here and not yet confirmed (count 0), or given back before this process had
    read the answer that brings it."""

    count: int


SETTLING = Mark(0)


class Holder:
    """One per engine and process. Its name owns pending entries; a process that was declared gone while it lived takes
    a new name and moves to it what nobody has taken yet. `held` is read and changed by the receiving thread, settling
    threads and the keeper, each time in one atomic step of the dict."""

    def __init__(self) -> None:
        self.epoch = 0
        self.held: dict[tuple[str, str], Delivery | Mark] = {}
        self.old_names: dict[str, float] = {}
        self._base = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"
        self._started = time.time()

    @property
    def name(self) -> str:
        return f"{self._base}.{self.epoch}" if self.epoch else self._base

    def rename(self) -> tuple[str, str]:
        """(old name, new name)."""
        old = self.name
        self.old_names[old] = time.monotonic()
        self.epoch += 1
        return old, self.name

    def info(self, queues: list[str], lease: float) -> str:
        return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "queues": sorted(set(queues)),
                           "lease": lease, "started": self._started})

    def hold(self, delivery: Delivery) -> bool:
        """False when the keeper has given this very delivery back meanwhile."""
        key = delivery.queue, delivery.id
        before = self.held.setdefault(key, delivery)
        if before is delivery:
            return True
        if isinstance(before, Mark) and before.count >= delivery.count:
            return False
        if isinstance(before, Delivery):
            before.take_away()
        self.held[key] = delivery
        return True

    def settling(self, delivery: Delivery) -> None:
        """It is settled here and soon in the store."""
        self.held[delivery.queue, delivery.id] = SETTLING

    def settling_failed(self, delivery: Delivery) -> None:
        """It is held as before."""
        self.held[delivery.queue, delivery.id] = delivery

    def settled(self, settles: Iterable[Settle]) -> None:
        """The store has confirmed."""
        for settle in settles:
            key = settle.queue, settle.id
            if self.held.get(key) is SETTLING:
                self.held.pop(key, None)

    def mine(self) -> list[Delivery]:
        return [what for what in list(self.held.values()) if isinstance(what, Delivery)]

    def take_unknown(self, queue: str, entry_id: str, count: int) -> bool:
        """Mark an entry that the store says is ours and that never arrived; False when it arrived meanwhile."""
        mark = Mark(count)
        before = self.held.setdefault((queue, entry_id), mark)
        if isinstance(before, Mark) and 0 < before.count < count:
            self.held[queue, entry_id] = before = mark
        return before is mark
