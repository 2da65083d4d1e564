"""Priorities and the order within one."""

from __future__ import annotations

from .kit import Engines, bodies, drain, messages, name, until


class TestPriority:
    def test_steps_are_served_strictly_in_order(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        for priority in (3, 1, 0, 2):
            engine.publish(queue, messages(f"{priority}a", f"{priority}b", priority=priority))
        consumer = engine.consume([queue])
        assert bodies(drain(consumer, 8)) == ["0a", "0b", "1a", "1b", "2a", "2b", "3a", "3b"]

    def test_in_one_batch_too(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, [*messages("c", priority=3), *messages("a"), *messages("b", priority=1)])
        assert bodies(drain(engine.consume([queue]), 3)) == ["a", "b", "c"]

    def test_a_later_urgent_one_goes_first(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages(*"ab", priority=3))
        consumer = engine.consume([queue])
        assert bodies(drain(consumer, 1)) == ["a"]
        engine.publish(queue, messages("urgent"))
        # a nats-server tells its consumers of it a moment later
        until(lambda: engine.ready(queue) == 2)
        assert bodies(drain(consumer, 2)) == ["urgent", "b"]

    def test_across_consumers(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages(*"cd", priority=2))
        engine.publish(queue, messages(*"ab", priority=0))
        first, second = engine.consume([queue]), engines().consume([queue])
        assert bodies([*drain(first, 1), *drain(second, 1), *drain(first, 1), *drain(second, 1)]) == list("abcd")

    def test_what_comes_back_keeps_its_step_and_its_place(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages(*"cd", priority=2))
        engine.publish(queue, messages(*"ab", priority=0))
        consumer = engine.consume([queue])
        got = drain(consumer, 3)
        assert bodies(got) == list("abc")
        engine.publish(queue, messages("a2"))
        consumer.hand_back([got[2], got[1]])
        consumer.nack(got[0])
        again = drain(consumer, 5)
        assert bodies(again) == ["a", "b", "a2", "c", "d"]
        assert [each.message.priority for each in again] == [0, 0, 0, 2, 2]

    def test_a_delayed_reject_keeps_its_step(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", priority=1))
        consumer = engine.consume([queue])
        consumer.nack(drain(consumer, 1)[0], delay=0.2)
        engine.publish(queue, messages("last", priority=3))
        engines.advance(0.3)
        got = drain(consumer, 2)
        assert [(each.message.body, each.message.priority) for each in got] == [(b"a", 1), (b"last", 3)]

    def test_a_step_that_is_not_there_is_the_last_one(self, engines: Engines) -> None:
        queue, engine = name(), engines(priority_steps=(0, 5))
        engine.publish(queue, messages("beyond", priority=7))
        engine.publish(queue, messages("beyond too", priority=7, delay=0.2))
        engine.publish(queue, messages("first"))
        engines.advance(0.3)
        consumer = engines(priority_steps=(0, 5)).consume([queue])
        assert bodies(drain(consumer, 3)) == ["first", "beyond", "beyond too"]
