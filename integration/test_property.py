"""Random histories of a queue, lived by the memory engine and by the Redis Streams engine side by side.

After each event both must show the same: what was handed out, in which order, with which counts, and what is ready,
delayed, in flight and dead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from streambroker.engine import Consumer
from streambroker.engines.memory import store
from streambroker.engines.redis_streams import takes
from streambroker.message import Delivery, Message, QueueSpec
from streambroker.testing.conformance.kit import LEASE, Engines, Mortal, messages, until
from streambroker.testing.conformance.memory import MemoryEngines
from streambroker.testing.conformance.real import RealEngines
from streambroker.testing.servers import RedisServer

QUEUE = "q"
#: longer than any history, so that no strict trial and no living holder's lease ends within one
LONG = 300.0
WHO = st.sampled_from("ab")
SOME = st.integers(1, 4)
#: (event, arguments...)
EVENTS = st.one_of(
    st.tuples(st.just("publish"), SOME, st.integers(0, 3)),
    st.tuples(st.just("publish"), SOME, st.just(0)),
    st.tuples(st.just("fetch"), WHO, st.integers(1, 6)),
    st.tuples(st.just("fetch"), WHO, st.integers(1, 6)),
    st.tuples(st.just("settle"), WHO, st.sampled_from(["ack", "nack", "nack", "hand_back", "dead_letter"]), SOME),
    st.tuples(st.just("later"), WHO, SOME),
    st.tuples(st.just("delay"), SOME, st.integers(0, 3)),
    st.tuples(st.just("soon"), WHO, SOME, st.integers(0, 3)),
    st.tuples(st.just("expire"), WHO, SOME),
    st.tuples(st.just("close"), WHO),
    st.tuples(st.just("replay")),
    st.tuples(st.just("drop"), st.integers(1, 3)),
    st.tuples(st.just("purge")),
)
CRASHES = st.one_of(EVENTS, EVENTS, EVENTS, st.tuples(st.just("crash"), SOME))
Event = tuple[Any, ...]


class Side:
    """One engine living a history."""

    def __init__(self, engines: Engines, limit: int, mortal_lease: float) -> None:
        self.engines = engines
        self.limit = limit
        self.mortal_lease = mortal_lease
        self.watcher = engines(delivery_limit=limit)
        self.watcher.declare(QueueSpec(QUEUE))
        self.published = 0
        self.consumers: dict[str, Consumer] = {who: self._consumer() for who in "ab"}
        self.held: dict[str, list[Delivery]] = {"a": [], "b": []}
        #: what the dying took, and who died
        self.mortals: list[Mortal] = []

    def _consumer(self) -> Consumer:
        return self.engines(delivery_limit=self.limit, visibility_timeout=LONG).consume([QUEUE])

    def _texts(self, number: int) -> list[str]:
        self.published += number
        return [str(text) for text in range(self.published - number, self.published)]

    def live(self, event: Event) -> object:
        """Let it happen; what could be seen of it at once."""
        return getattr(self, event[0])(*event[1:])

    def publish(self, number: int, priority: int) -> object:
        batch = [Message(text.encode(), id=f"job {int(text) % 3}", priority=priority) for text in self._texts(number)]
        return len(self.watcher.publish(QUEUE, batch))

    def fetch(self, who: str, limit: int) -> object:
        got = self.consumers[who].fetch(limit)
        self.held[who] += got
        return [(each.message.body, each.message.priority, each.count, each.redelivered) for each in got]

    def settle(self, who: str, how: str, number: int) -> None:
        chosen, self.held[who] = self.held[who][:number], self.held[who][number:]
        consumer = self.consumers[who]
        for delivery in chosen:
            if how == "hand_back":
                consumer.hand_back([delivery])
            elif how == "dead_letter":
                consumer.dead_letter(delivery, "why")
            else:
                getattr(consumer, how)(delivery)
        consumer.receive(0, 0)

    def later(self, who: str, number: int) -> object:
        """Not for one that would come back on its last chance: engines find that out at different times."""
        first = self.limit - 2 if self.limit >= 4 else max(1, self.limit - 1)
        chosen = [each for each in self.held[who] if not self.limit or each.count < first][:number]
        self.held[who] = [each for each in self.held[who] if each not in chosen]
        for delivery in chosen:
            self.consumers[who].nack(delivery, delay=0.2)
            self.consumers[who].receive(0, 0)
            self.engines.advance(0.01)
        self.engines.advance(0.3)
        return self.fetch(who, 1)

    def delay(self, number: int, priority: int) -> object:
        return len(self.watcher.publish(QUEUE, [
            Message(text.encode(), id=f"job {int(text) % 3}", priority=priority, delay=1000)
            for text in self._texts(number)]))

    def soon(self, who: str, number: int, priority: int) -> object:
        """The fetch is what moves due messages where nobody waits for any."""
        self.watcher.publish(QUEUE, [Message(text.encode(), priority=priority, delay=0.1 + 0.02 * place)
                                     for place, text in enumerate(self._texts(number))])
        self.engines.advance(0.3)
        return self.fetch(who, 1)

    def expire(self, who: str, number: int) -> object:
        self.watcher.publish(QUEUE, messages(*self._texts(number), expires=0.1))
        self.engines.advance(0.15)
        return self.fetch(who, 1000)

    def close(self, who: str) -> None:
        self.consumers[who].close()
        self.held[who] = []
        self.consumers[who] = self._consumer()

    def replay(self) -> object:
        inspector = self.watcher.inspector()
        return inspector.replay(QUEUE, [letter.id for letter in inspector.dead(QUEUE)])

    def drop(self, job: int) -> object:
        return self.watcher.inspector().drop([f"job {job}"], [QUEUE])

    def purge(self) -> object:
        return self.watcher.inspector().purge(QUEUE)

    def crash(self, limit: int) -> object:
        mortal = self.engines.mortal(delivery_limit=self.limit, visibility_timeout=self.mortal_lease)
        taken = mortal.take(QUEUE, limit, 0)
        mortal.die()
        if isinstance(self.engines, MemoryEngines):
            self.engines.advance(self.mortal_lease)
        return [(each.body, each.count, each.redelivered) for each in taken]

    def state(self) -> object:
        inspector = self.watcher.inspector()
        stats = inspector.stats(QUEUE)
        return (
            {"ready": stats.ready, "delayed": stats.delayed, "in flight": stats.in_flight, "dead": stats.dead},
            sorted(row.count for row in inspector.in_flight(QUEUE)),
            [(letter.message.body, letter.reason, letter.count) for letter in inspector.dead(QUEUE)],
            sorted(row.message.body for row in inspector.delayed(QUEUE)))


def compare(server: RedisServer, history: list[Event], limit: int) -> None:
    model = Side(MemoryEngines(), limit, mortal_lease=LEASE)
    subject = Side(RealEngines(server.url(), {"visibility_timeout": LONG}), limit, mortal_lease=LONG)
    try:
        for number, event in enumerate(history):
            expected, got = model.live(event), subject.live(event)
            assert got == expected, f"event {number}, {event}"
            wanted, seen = model.state(), None

            def same(wanted: object = wanted) -> bool:
                nonlocal seen
                seen = subject.state()
                return seen == wanted

            try:
                until(same, timeout=12.0 if event[0] == "crash" else 3.0)
            except AssertionError:
                pytest.fail(f"after event {number}, {event}:\nexpected {wanted}\n     got {seen}")
    finally:
        note(f"limit {limit}, history {history}")
        subject.engines.close()
        model.engines.close()


@pytest.fixture
def server(every_kind: str, servers: Callable[[str], RedisServer]) -> Iterator[RedisServer]:
    # trials do not end by themselves: the clocks of the two sides are not the same
    with mock.patch.object(store, "TRIAL", LONG), mock.patch.object(takes, "TRIAL", LONG):
        yield servers(every_kind)


def profile(examples: int) -> settings:
    """The same histories each time; none is made shorter, since each takes its real time."""
    return settings(max_examples=examples, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate],
                    suppress_health_check=list(HealthCheck))


@profile(12)
@given(history=st.lists(EVENTS, min_size=15, max_size=30), limit=st.sampled_from([0, 2, 3, 4, 5]))
def test_histories(server: RedisServer, history: list[Event], limit: int) -> None:
    compare(server, history, limit)


@profile(3)
@given(history=st.lists(CRASHES, min_size=12, max_size=20), limit=st.sampled_from([2, 3, 4]))
def test_histories_with_crashes(server: RedisServer, history: list[Event], limit: int) -> None:
    compare(server, history, limit)


@pytest.mark.long
@pytest.mark.timeout(3600)
@profile(300)
@given(history=st.lists(EVENTS, min_size=20, max_size=60), limit=st.sampled_from([0, 1, 2, 3, 4, 5]))
def test_many_histories(server: RedisServer, history: list[Event], limit: int) -> None:
    compare(server, history, limit)


@pytest.mark.long
@pytest.mark.timeout(3600)
@profile(60)
@given(history=st.lists(CRASHES, min_size=20, max_size=40), limit=st.sampled_from([1, 2, 3, 4, 5]))
def test_many_histories_with_crashes(server: RedisServer, history: list[Event], limit: int) -> None:
    compare(server, history, limit)
