"""Delays: by the store's clock, never early, whoever lives."""

from __future__ import annotations

import time

from ...message import Delivery
from .kit import Engines, acked, bodies, drain, messages, name


class TestDelay:
    def test_never_early_and_not_late(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        consumer = engines().consume([queue])
        sent = time.monotonic()
        engine.publish(queue, messages("a", delay=0.8))
        assert engine.ready(queue) == 0
        engines.advance(0.4)
        engines.nothing(consumer)
        engines.advance(0.05)
        if engines.quiet:
            assert bodies(drain(consumer, 1)) == ["a"]
            assert 0.8 <= time.monotonic() - sent < 1.3
        else:
            engines.advance(0.35)
            assert bodies(drain(consumer, 1)) == ["a"]

    def test_one_that_is_due_earlier_comes_earlier(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        consumer = engine.consume([queue])
        consumer.receive(0)
        engine.publish(queue, messages("late", delay=60))
        engine.publish(queue, [*messages("third", delay=0.5), *messages("second", delay=0.3),
                               *messages("first", delay=0.1)])
        engine.publish(queue, messages("now"))
        assert bodies(drain(consumer, 1)) == ["now"]
        engines.advance(0.6)
        assert bodies(drain(consumer, 3)) == ["first", "second", "third"]

    def test_delayed_ones_keep_nobody_waiting(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages(*(str(number) for number in range(500)), delay=3600))
        engine.publish(queue, messages("now"))
        consumer = engine.consume([queue])
        got = drain(consumer, 1)
        assert bodies(got) == ["now"]
        acked(consumer, got)
        stats = engine.inspector().stats(queue)
        assert (stats.ready, stats.delayed) == (0, 500)

    def test_many_due_at_once_come_once_each(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        texts = [str(number) for number in range(300)]
        engine.publish(queue, messages(*texts, delay=0.3))
        consumers = [engines().consume([queue]), engines().consume([queue])]
        engines.advance(0.3)
        got: list[Delivery] = []
        end = time.monotonic() + 5
        while len(got) < 300 and time.monotonic() < end:
            for consumer in consumers:
                got += consumer.receive(0.02, 20)
        assert sorted(bodies(got), key=int) == texts
        for consumer in consumers:
            engines.nothing(consumer)

    def test_what_is_due_counts_as_ready_though_nobody_asks(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, [*messages("due", delay=0.2), *messages("later", delay=60)])
        engines.advance(0.3)
        assert engine.ready(queue) == 1
        stats = engine.inspector().stats(queue)
        assert (stats.ready, stats.delayed) == (1, 1)

    def test_survives_its_publisher(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", delay=0.3))
        engine.close()
        engines.advance(0.3)
        got, = drain(engines().consume([queue]), 1)
        assert (got.message.body, got.count, got.redelivered) == (b"a", 1, False)

    def test_the_message_is_whole_and_keeps_its_priority(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages(b"\x00\n\xff|\n", head=b'{"a": "\\n"}', id="id\nwith|odd signs", priority=2,
                                       delay=0.2))
        engines.advance(0.3)
        engine.publish(queue, messages("x", priority=3))
        got = drain(engine.consume([queue]), 2)
        first = got[0].message
        assert (first.body, first.head, first.id, first.priority) == (
            b"\x00\n\xff|\n", b'{"a": "\\n"}', "id\nwith|odd signs", 2)

    def test_two_of_the_same_are_two(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        for _ in range(2):
            engine.publish(queue, messages("same", "same", id="same", delay=0.2))
        assert engine.inspector().stats(queue).delayed == 4
        engines.advance(0.2)
        assert bodies(drain(engine.consume([queue]), 4)) == ["same"] * 4

    def test_a_mixed_batch(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        ids = engine.publish(queue, [*messages("now"), *messages("later", delay=60), *messages("now too")])
        assert len(ids) == 3
        stats = engine.inspector().stats(queue)
        assert (stats.ready, stats.delayed) == (2, 1)

    def test_without_create_a_missing_queue_takes_nothing(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        assert engine.publish(queue, messages("a", delay=60), create=False) == []
        assert engine.inspector().stats(queue).delayed == 0


class TestSteeringDelays:
    def test_listing(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, [*messages("a", id="x", delay=100), *messages("b", id="y", delay=200, priority=1)])
        rows = sorted(engine.inspector().delayed(queue), key=lambda row: row.due)
        assert bodies(rows) == ["a", "b"]
        assert [row.message.id for row in rows] == ["x", "y"]
        assert [row.queue for row in rows] == [queue, queue]
        assert 95 < rows[1].due - rows[0].due < 105

    def test_due_is_a_posix_time(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", delay=100))
        row, = engine.inspector().delayed(queue)
        assert abs(row.due - (time.time() + 100)) < 5

    def test_removing_by_row(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", "b", "c", delay=100))
        ids = [row.id for row in engine.inspector().delayed(queue) if row.message.body != b"b"]
        assert len(set(ids)) == 2
        assert engine.inspector().delayed_remove(queue, ids) == 2
        assert engine.inspector().delayed_remove(queue, ids) == 0
        assert bodies(engine.inspector().delayed(queue)) == ["b"]

    def test_dropping_by_job(self, engines: Engines) -> None:
        first, second, engine = name(), name(), engines()
        for queue in (first, second):
            engine.publish(queue, [*messages("a", "b", id="job\n1|%", delay=100), *messages("c", id="job", delay=100)])
        inspector = engine.inspector()
        assert inspector.drop(["job\n1|%"], [first]) == 2
        assert bodies(inspector.delayed(first)) == ["c"]
        assert inspector.drop(["job\n1|%"]) == 2
        assert bodies(inspector.delayed(second)) == ["c"]
        assert inspector.drop(["nobody"]) == 0
        assert inspector.drop(["job"], []) == 0

    def test_dropping_many_jobs_at_once(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        jobs = [f"job-{number}" for number in range(1500)]
        engine.publish(queue, [message for job in jobs for message in messages(job, id=job, delay=100)])
        assert engine.inspector().drop([]) == 0
        assert engine.inspector().drop([*jobs[:-3], "nobody"], [queue]) == 1497
        assert sorted(bodies(engine.inspector().delayed(queue))) == jobs[-3:]

    def test_dropping_leaves_what_is_ready(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, [*messages("now", id="job"), *messages("later", id="job", delay=100)])
        assert engine.inspector().drop(["job"], [queue]) == 1
        assert bodies(drain(engine.consume([queue]), 1)) == ["now"]
