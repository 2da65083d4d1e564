"""Random lives of a queue in the memory engine against a ledger that only knows what must be true of every engine."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from streambroker.engine import Consumer
from streambroker.engines.memory import store
from streambroker.message import Delivery, Message, QueueSpec
from streambroker.testing.conformance.kit import LEASE, Mortal, Taken
from streambroker.testing.conformance.memory import MemoryEngines

QUEUE = "q"
HOW = st.sampled_from(["ack", "nack", "nack", "later", "hand_back", "dead_letter"])
WHICH = st.integers(0, 1)


@dataclass
class Line:
    """What the ledger knows of one message."""

    priority: int
    place: int
    state: str = "ready"
    count: int = 0
    owner: object = None
    due: float = 0.0


class Lives(RuleBasedStateMachine):
    """`limit` 0: then the order is fixed wholly. Otherwise last chances make exceptions that only the model knows."""

    limit = 0

    @initialize()
    def open(self) -> None:
        self.patch = mock.patch.object(store, "TRIAL", 10000.0)
        self.patch.start()
        self.engines = MemoryEngines()
        self.watcher = self.engines(delivery_limit=self.limit)
        self.watcher.declare(QueueSpec(QUEUE))
        self.consumers = [self._consumer() for _ in range(2)]
        self.held: list[list[Delivery]] = [[], []]
        self.mortals: list[Mortal] = [self.engines.mortal(delivery_limit=self.limit) for _ in range(2)]
        self.ghosts: list[tuple[Mortal, Taken]] = []
        self.taken: list[list[Taken]] = [[], []]
        self.ledger: dict[bytes, Line] = {}
        self.places, self.now = 0, 0.0
        self.publish(0, 0.0, 4)

    def teardown(self) -> None:
        self.engines.close()
        self.patch.stop()

    @rule(priority=st.integers(0, 3), delay=st.sampled_from([0.0, 0.0, 0.0, 5.0]), copies=st.integers(1, 4))
    def more(self, priority: int, delay: float, copies: int) -> None:
        self.publish(priority, delay, copies)

    def publish(self, priority: int, delay: float, copies: int) -> None:
        batch = []
        for _ in range(copies):
            body = b"%d" % self._next_place()
            state = "delayed" if delay else "ready"
            self.ledger[body] = Line(priority, self.places, state, due=self.now + delay)
            batch.append(Message(body, priority=priority, delay=delay))
        assert len(self.watcher.publish(QUEUE, batch)) == copies

    @rule(which=WHICH, limit=st.integers(1, 5))
    def receive(self, which: int, limit: int) -> None:
        consumer = self.consumers[which]
        got = consumer.receive(0, limit)
        assert len(got) <= limit
        for delivery in got:
            self._handed_out(delivery.message.body, delivery.count, delivery.redelivered, consumer)
        if not self.limit:
            assert len(got) == limit or not any(line.state == "ready" for line in self.ledger.values())
        self.held[which] += got

    @rule(which=WHICH, how=HOW, number=st.integers(1, 3), twice=st.booleans())
    def settle(self, which: int, how: str, number: int, twice: bool) -> None:
        consumer, deliveries = self.consumers[which], self.held[which][:number]
        del self.held[which][:number]
        for delivery in deliveries * (2 if twice else 1):
            if how == "later":
                consumer.nack(delivery, delay=5.0)
            elif how == "hand_back":
                consumer.hand_back([delivery])
            elif how == "dead_letter":
                consumer.dead_letter(delivery, "why")
            else:
                getattr(consumer, how)(delivery)
        for delivery in deliveries:
            line = self.ledger[delivery.message.body]
            line.owner = None
            if how == "ack":
                line.state = "done"
            elif how == "dead_letter" or (how != "hand_back" and self.limit and line.count >= self.limit):
                line.state = "dead"
            elif how == "later":
                line.state, line.due = "delayed", self.now + 5.0
            else:
                line.state = "ready"
                line.count -= how == "hand_back"

    @rule(which=WHICH, limit=st.integers(1, 6))
    def take(self, which: int, limit: int) -> None:
        mortal = self.mortals[which]
        got = mortal.take(QUEUE, limit, 0.0001)
        for taken in got:
            self._handed_out(taken.body, taken.count, taken.redelivered, mortal)
        self.taken[which] += got

    @rule(which=WHICH, more=st.integers(0, 3))
    def die(self, which: int, more: int) -> None:
        self.take(which, more)
        mortal = self.mortals[which]
        mortal.die()
        self._advance(LEASE)
        lost = [(body, line) for body, line in self.ledger.items() if line.owner is mortal]
        dead = {letter.message.body: letter for letter in self.watcher.inspector().dead(QUEUE)}
        for body, line in lost:
            line.owner, line.state = None, "dead" if body in dead else "ready"
            if body in dead:
                assert line.count >= self.limit > 0
                assert len(lost) == 1 or line.count >= 2 * self.limit, "convicted in company"
                assert dead[body].reason == f"delivery limit of {self.limit} reached: its worker died"
        self.ghosts += [(mortal, taken) for taken in self.taken[which]]
        self.mortals[which], self.taken[which] = self.engines.mortal(delivery_limit=self.limit), []

    @rule(how=st.sampled_from(["ack", "nack", "hand_back", "dead_letter"]))
    def haunt(self, how: str) -> None:
        """Someone who lost his lease settles all the same: nothing may change."""
        for mortal, taken in self.ghosts:
            mortal.settle(how, taken.id)
        self.ghosts.clear()

    @rule(which=WHICH)
    def close(self, which: int) -> None:
        self.consumers[which].close()
        for delivery in self.held[which]:
            line = self.ledger[delivery.message.body]
            line.owner, line.state = None, "ready"
            line.count -= 1
        self.held[which] = []
        self.consumers[which] = self._consumer()

    @rule()
    def wait(self) -> None:
        self._advance(5.0)

    @rule()
    def replay(self) -> None:
        inspector = self.watcher.inspector()
        letters = list(inspector.dead(QUEUE))
        assert inspector.replay(QUEUE, [letter.id for letter in letters]) == len(letters)
        for letter in letters:
            line = self.ledger[letter.message.body]
            line.state, line.count, line.place = "ready", 0, self._next_place()

    @rule(luck=st.integers(0, 9))
    def purge(self, luck: int) -> None:
        """Seldom: it ends most of what makes a life interesting."""
        if luck:
            return
        gone = [line for line in self.ledger.values() if line.state in ("ready", "delayed")]
        assert self.watcher.inspector().purge(QUEUE) == len(gone)
        for line in gone:
            line.state = "done"

    @invariant()
    def nothing_is_lost_and_nothing_doubled(self) -> None:
        stats = self.watcher.inspector().stats(QUEUE)
        states = [line.state for line in self.ledger.values()]
        assert (stats.ready, stats.delayed, stats.in_flight, stats.dead) == tuple(
            states.count(state) for state in ("ready", "delayed", "held", "dead"))
        assert len({row.id for row in self.watcher.inspector().in_flight(QUEUE)}) == stats.in_flight

    @invariant()
    def a_holder_has_one_last_chance_at_most(self) -> None:
        for consumer in self.consumers:
            counts = [line.count for line in self.ledger.values() if line.owner is consumer]
            assert not self.limit or sum(count >= self.limit for count in counts) <= 1

    def _consumer(self) -> Consumer:
        """Its lease, which ends trials, is longer than any life, as `TRIAL` is here."""
        return self.engines(delivery_limit=self.limit, visibility_timeout=10000).consume([QUEUE])

    def _next_place(self) -> int:
        self.places += 1
        return self.places

    def _handed_out(self, body: bytes, count: int, redelivered: bool, owner: object) -> None:
        line = self.ledger[body]
        assert line.state == "ready", f"{body!r} was handed out though it is {line.state}"
        if self.limit and line.count >= self.limit and owner in self.consumers:
            assert owner not in [each.owner for each in self.ledger.values()], "a strict trial in company"
        line.count += 1
        assert count == line.count
        assert redelivered or count == 1
        if not self.limit:
            first = min((each.priority, each.place) for each in self.ledger.values() if each.state == "ready")
            assert (line.priority, line.place) == first, "out of order"
        line.state, line.owner = "held", owner

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        self.engines.advance(seconds)
        # what is due is at the end of its step now, in the order of the due times
        due = [line for line in self.ledger.values() if line.state == "delayed" and line.due <= self.now]
        for line in sorted(due, key=lambda line: (line.due, line.place)):
            line.state, line.place = "ready", self._next_place()


class LimitedLives(Lives):
    limit = 2


PROFILE = settings(max_examples=60, stateful_step_count=50, deadline=None, derandomize=True)
TestLives = Lives.TestCase
TestLives.settings = PROFILE
TestLimitedLives = LimitedLives.TestCase
TestLimitedLives.settings = PROFILE
