"""Counters of rate limiters and barriers on NATS JetStream.

    from dramatiq.rate_limits import ConcurrentRateLimiter
    from streambroker.dramatiq.rate_limits import JetStreamBackend

    mutex = ConcurrentRateLimiter(JetStreamBackend(url="nats://localhost:4222"), "report", limit=1)
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dramatiq.rate_limits.backend import RateLimiterBackend

from .backends import DEFAULT_URL, open_store

if TYPE_CHECKING:
    from ..results.store import Stored

#: longest pause before a counter that somebody else has changed is changed again (seconds)
PAUSE = 0.02


class JetStreamBackend(RateLimiterBackend):
    """Each key is a subject of its own, changed by compare-and-set. Thread-safe, greenlet-safe; in a forked child it
    connects anew. All times are ms, by the clock of the process. Options are those of JetStreamBroker.

    Raises ConfigurationError, and what the store raises.
    """

    def __init__(self, *, url: str = DEFAULT_URL, namespace: str = "dramatiq-limits", **options: Any) -> None:
        self.namespace = namespace
        self.store = open_store(url, options)

    def add(self, key: str, value: int, ttl: int) -> bool:
        return self._change(key, lambda present: value if present is None else None, ttl)

    def incr(self, key: str, amount: int, maximum: int, ttl: int) -> bool:
        def change(present: int | None) -> int | None:
            value = (present or 0) + amount
            return value if value <= maximum else None

        return self._change(key, change, ttl)

    def decr(self, key: str, amount: int, minimum: int, ttl: int) -> bool:
        def change(present: int | None) -> int | None:
            value = (present or 0) - amount
            return value if value >= minimum else None

        return self._change(key, change, ttl)

    def incr_and_sum(self, key: str, keys: Callable[[], Sequence[str]], amount: int, maximum: int, ttl: int) -> bool:
        """The sum may be refused to two that come in the same moment where one would have had room; it is never
        exceeded."""
        def change(present: int | None) -> int | None:
            value = (present or 0) + amount
            return value if value <= maximum and amount + self._sum(keys(), {key: present or 0}) <= maximum else None

        if not self._change(key, change, ttl):
            return False
        names = keys()
        if set(names) <= {key} or self._sum(names, {}) <= maximum:
            return True
        # another one has counted up another of the keys meanwhile
        self._change(key, lambda present: None if present is None else present - amount, ttl)
        return False

    def wait(self, key: str, timeout: int | None) -> bool:
        """Whether an event was told within `timeout` ms, or before: it is there for its whole time. None: for ever."""
        return self.store.wait(self._name(key), None if timeout is None else timeout / 1000,
                               lambda found: _value(found) is not None) is not None

    def wait_notify(self, key: str, ttl: int) -> None:
        self.store.put(self._name(key), _encode(1, ttl), expires=ttl / 1000)

    def _name(self, key: str) -> str:
        return f"{self.namespace}:{key}"

    def _sum(self, keys: Sequence[str], known: dict[str, int]) -> int:
        others = [key for key in keys if key not in known]
        found = self.store.get_many([self._name(key) for key in others])
        return sum(known[key] for key in keys if key in known) + sum(_value(each) or 0 for each in found)

    def _change(self, key: str, change: Callable[[int | None], int | None], ttl: int) -> bool:
        """Store what `change` makes of the value, None when there is none; False and nothing when it gives None."""
        from ..results.store import Conflict

        name, tries = self._name(key), 0
        while True:
            found = self.store.get(name)
            value = change(_value(found))
            if value is None:
                return False
            try:
                self.store.put(name, _encode(value, ttl), expires=ttl / 1000, expected=found.sequence if found else 0)
            except Conflict:
                tries += 1
                time.sleep(random.uniform(0, min(PAUSE, 0.002 * tries)))
            else:
                return True


def _encode(value: int, ttl: int) -> bytes:
    # the server's own time for a value is coarse, and not known to servers before 2.11
    return json.dumps([value, time.time() + ttl / 1000]).encode()


def _value(found: Stored | None) -> int | None:
    """None also when its time is over."""
    if found is None:
        return None
    value, ends = json.loads(found.value)
    return int(value) if ends > time.time() else None
