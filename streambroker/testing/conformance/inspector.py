"""Looking and steering."""

from __future__ import annotations

import os

from ...message import QueueSpec, QueueStats
from .kit import Engines, bodies, drain, messages, name, until


class TestInspector:
    def test_queues_that_are_declared_or_hold_something(self, engines: Engines) -> None:
        start, engine = name("list"), engines()
        declared, filled, delayed, buried = (f"{start}-{number}" for number in (3, 1, 2, 0))
        engine.declare(QueueSpec(declared))
        engine.publish(filled, messages("a"))
        engine.publish(delayed, messages("a", delay=60))
        engine.publish(buried, messages("a"))
        consumer = engine.consume([buried])
        consumer.dead_letter(drain(consumer, 1)[0], "why")
        consumer.close()
        found = engines().inspector().queues()
        assert [each for each in found if each.startswith(start)] == [buried, filled, delayed, declared]
        assert found == sorted(found)

    def test_stats_of_nothing(self, engines: Engines) -> None:
        queue = name()
        stats = engines().inspector().stats(queue)
        assert (stats.queue, stats.ready, stats.delayed, stats.in_flight, stats.dead) == (queue, 0, 0, 0, 0)
        assert (stats.oldest_age, stats.holders) == (None, ())

    def test_stats(self, engines: Engines) -> None:
        queue, engine, other = name(), engines(), engines()
        engine.publish(queue, [*messages("z", delay=60), *messages("a", "b", "c", "d"), *messages("e", priority=3)])
        first, second = engine.consume([queue]), other.consume([queue])
        got = drain(first, 2)
        first.nack(got[0])
        drain(first, 1)
        third = drain(second, 1)
        second.dead_letter(third[0], "why")
        drain(second, 1)
        engines.advance(0.3)
        until(lambda: engine.inspector().stats(queue).dead == 1)
        stats = engine.inspector().stats(queue)
        assert isinstance(stats, QueueStats)
        assert (stats.ready, stats.delayed, stats.in_flight, stats.dead) == (1, 1, 3, 1)
        assert stats.durable is True
        assert stats.oldest_age is not None and 0.25 <= stats.oldest_age < 20
        assert sorted((row.count, row.max_delivery_count) for row in stats.holders) == [(1, 1), (2, 2)]
        assert all(0.2 < row.oldest_age < 20 for row in stats.holders)
        assert len({row.holder for row in stats.holders}) == 2

    def test_in_flight(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages(*"abc"))
        consumer = engine.consume([queue])
        got = drain(consumer, 3)
        consumer.nack(got[2])
        drain(consumer, 1)
        engines.advance(0.3)
        rows = engine.inspector().in_flight(queue)
        assert sorted(row.id for row in rows) == sorted(each.id for each in got)
        assert {row.queue for row in rows} == {queue}
        assert sorted(row.count for row in rows) == [1, 1, 2]
        assert len({row.holder for row in rows}) == 1
        assert all(0.2 < row.age < 20 for row in rows)
        assert len(engine.inspector().in_flight(queue, limit=2)) == 2
        assert engine.inspector().in_flight(name()) == []

    def test_the_age_in_flight_is_since_the_hand_over(self, engines: Engines) -> None:
        """Renewing a lease does not make a delivery look young."""
        queue, engine = name(), engines()
        engine.publish(queue, messages("a"))
        consumer = engine.consume([queue])
        drain(consumer, 1)
        for _ in range(4):
            engines.advance(0.5)
            consumer.receive(0, 0)
        row, = engine.inspector().in_flight(queue)
        assert row.age >= 1.9

    def test_workers(self, engines: Engines) -> None:
        first, second, engine = name("a"), name("b"), engines(visibility_timeout=7)
        consumer = engine.consume([second, first])
        consumer.receive(0)
        engine.publish(first, messages("a"))
        drain(consumer, 1)
        holder = engine.inspector().in_flight(first)[0].holder
        worker, = (each for each in engines().inspector().workers() if each.holder == holder)
        assert (worker.pid, worker.lease, worker.queues) == (os.getpid(), 7, (first, second))
        assert worker.host
        assert 0 <= worker.seen < 7
        consumer.close()
        engine.close()
        until(lambda: holder not in [each.holder for each in engines().inspector().workers()])

    def test_purge_removes_ready_and_delayed_and_counts_them(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        for priority in (0, 1, 3):
            engine.publish(queue, messages(*"abcdefgh", priority=priority))
        engine.publish(queue, messages("later", "later", delay=60))
        consumer = engine.consume([queue])
        held = drain(consumer, 3)
        consumer.hand_back(held[:1])
        consumer.receive(0, 0)
        assert engine.inspector().purge(queue) == 24
        stats = engine.inspector().stats(queue)
        assert (stats.ready, stats.delayed, stats.in_flight) == (0, 0, 2)
        assert engine.inspector().purge(queue) == 0
        engine.publish(queue, messages("new"))
        consumer.nack(held[1])
        got = drain(consumer, 2)
        assert bodies(got) == ["b", "new"]

    def test_purge_of_a_long_queue(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        texts = [str(number) for number in range(3000)]
        engine.publish(queue, messages(*texts))
        assert engine.inspector().purge(queue) == 3000
        assert engine.ready(queue) == 0

    def test_purge_of_nothing(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        assert engine.inspector().purge(queue) == 0
        assert queue not in engine.inspector().queues()

    def test_looking_changes_nothing(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", "b"))
        consumer = engine.consume([queue])
        got = drain(consumer, 1)
        inspector = engine.inspector()
        for _ in range(3):
            inspector.queues()
            inspector.stats(queue)
            inspector.in_flight(queue)
            inspector.workers()
            list(inspector.dead(queue))
            list(inspector.delayed(queue))
        consumer.hand_back(got)
        assert [(each.message.body, each.count) for each in drain(consumer, 2)] == [(b"a", 1), (b"b", 1)]
