"""Dead letters: what they keep, replay, bounds, forwarding."""

from __future__ import annotations

import time

from ...engine import Engine
from ...message import DeadLetter, Message
from .kit import Engines, acked, bodies, drain, messages, name, until


def bury(engine: Engine, queue: str, *texts: str, reason: str = "why") -> None:
    """Publish and give up each."""
    engine.publish(queue, messages(*texts))
    consumer = engine.consume([queue])
    for delivery in drain(consumer, len(texts)):
        consumer.dead_letter(delivery, reason)
    consumer.close()


class TestDeadLetters:
    def test_everything_is_kept(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        before = time.time()
        engine.publish(queue, [Message(b"\x00\xff", head=b'{"type": "t"}', id="job", priority=1)])
        consumer = engine.consume([queue])
        consumer.nack(drain(consumer, 1)[0])
        got, = drain(consumer, 1)
        holder = engine.inspector().in_flight(queue)[0].holder
        consumer.dead_letter(got, "because: é\n*")
        consumer.receive(0, 0)
        until(lambda: engine.inspector().stats(queue).dead == 1)
        letter, = engines().inspector().dead(queue)
        message = letter.message
        assert (message.body, message.head, message.id, message.priority) == (b"\x00\xff", b'{"type": "t"}', "job", 1)
        assert (letter.queue, letter.reason, letter.count, letter.holder) == (queue, "because: é\n*", 2, holder)
        assert before - 2 < letter.first <= letter.last < time.time() + 2

    def test_a_reason_may_be_any_text(self, engines: Engines) -> None:
        """Parts of a message that is wrong are in it."""
        queue, engine = name(), engines()
        bury(engine, queue, "a", reason="half a pair \ud800, \0, \udcff")
        until(lambda: engine.inspector().stats(queue).dead == 1)
        letter, = engine.inspector().dead(queue)
        assert letter.reason == "half a pair \\ud800, \0, \\udcff"

    def test_the_first_publish_is_remembered(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a"))
        consumer = engine.consume([queue])
        consumer.nack(drain(consumer, 1)[0], delay=1.5)
        engines.advance(1.5)
        consumer.dead_letter(drain(consumer, 1)[0], "why")
        consumer.receive(0, 0)
        until(lambda: engine.inspector().stats(queue).dead == 1)
        letter, = engine.inspector().dead(queue)
        assert letter.last - letter.first >= 1.4

    def test_another_message_can_be_kept_in_its_place(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, [Message(b"a", id="job", priority=1), Message(b"b", id="job")])
        consumer = engine.consume([queue])
        for got in drain(consumer, 2):
            consumer.dead_letter(got, "why", Message(got.message.body + b"+traceback", b'{"dead": 1}', "job"))
        consumer.receive(0, 0)
        until(lambda: engine.inspector().stats(queue).dead == 2)
        letters = list(engine.inspector().dead(queue))
        assert sorted(bodies(letters)) == ["a+traceback", "b+traceback"]
        assert {(letter.message.head, letter.message.id, letter.reason) for letter in letters} == {
            (b'{"dead": 1}', "job", "why")}
        engine.inspector().replay(queue, [letter.id for letter in letters])
        again = drain(consumer, 2)
        assert bodies(again) == ["b+traceback", "a+traceback"]
        assert [each.message.priority for each in again] == [0, 1]

    def test_oldest_first(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        for text in "abc":
            bury(engine, queue, text)
        assert bodies(engine.inspector().dead(queue)) == ["a", "b", "c"]

    def test_none(self, engines: Engines) -> None:
        queue, inspector = name(), engines().inspector()
        assert list(inspector.dead(queue)) == []
        assert inspector.dead_remove(queue, ["1-0", "x"]) == 0
        assert inspector.replay(queue, ["1-0", "x"]) == 0

    def test_removing(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        bury(engine, queue, *"abc")
        inspector = engine.inspector()
        ids = {letter.message.body: letter.id for letter in inspector.dead(queue)}
        assert inspector.dead_remove(queue, [ids[b"a"], ids[b"c"]]) == 2
        assert inspector.dead_remove(queue, [ids[b"a"]]) == 0
        assert bodies(inspector.dead(queue)) == ["b"]

    def test_replay(self, engines: Engines) -> None:
        queue, engine = name(), engines(delivery_limit=2)
        engine.publish(queue, messages("a", id="job", priority=2))
        consumer = engine.consume([queue])
        for _ in range(2):
            consumer.nack(drain(consumer, 1)[0])
        consumer.receive(0, 0)
        inspector = engine.inspector()
        until(lambda: inspector.stats(queue).dead == 1)
        ids = [letter.id for letter in inspector.dead(queue)]
        assert inspector.replay(queue, ids) == 1
        assert inspector.replay(queue, ids) == 0
        assert list(inspector.dead(queue)) == []
        got, = drain(consumer, 1)
        assert (got.message.body, got.message.id, got.message.priority) == (b"a", "job", 2)
        assert (got.count, got.redelivered, got.replayed) == (1, False, True)
        consumer.nack(got)
        assert drain(consumer, 1)[0].count == 2

    def test_a_replayed_one_is_known_as_such_until_it_is_settled(self, engines: Engines) -> None:
        queue, engine = name(), engines(delivery_limit=9)
        bury(engine, queue, "a")
        inspector = engine.inspector()
        inspector.replay(queue, [letter.id for letter in inspector.dead(queue)])
        consumer = engine.consume([queue])
        consumer.nack(drain(consumer, 1)[0])
        consumer.nack(drain(consumer, 1)[0], delay=0.3)
        engines.advance(0.3)
        consumer.nack(drain(consumer, 1)[0], delay=0.3)
        engines.advance(0.3)
        got, = drain(consumer, 1)
        assert (got.replayed, got.count) == (True, 4)
        consumer.dead_letter(got, "why")
        engine.publish(queue, messages("b"))
        assert not drain(consumer, 1)[0].replayed
        until(lambda: inspector.stats(queue).dead == 1)
        inspector.replay(queue, [letter.id for letter in inspector.dead(queue)])
        got, = drain(consumer, 1)
        assert (got.replayed, got.count) == (True, 1)

    def test_replay_wakes_an_idle_consumer(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        bury(engine, queue, "a", "b")
        consumer = engines().consume([queue])
        consumer.receive(engines.quiet)
        inspector = engine.inspector()
        assert inspector.replay(queue, [letter.id for letter in inspector.dead(queue)]) == 2
        start = time.monotonic()
        assert bodies(drain(consumer, 2)) == ["a", "b"]
        assert time.monotonic() - start < 2.0

    def test_replay_into_a_queue_that_was_deleted(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        bury(engine, queue, "a")
        engine.delete(queue)
        inspector = engine.inspector()
        assert inspector.replay(queue, [letter.id for letter in inspector.dead(queue)]) == 1
        assert bodies(drain(engine.consume([queue]), 1)) == ["a"]

    def test_they_are_bounded_in_number(self, engines: Engines) -> None:
        queue, engine = name(), engines(dead_letter_max_count=3)
        bury(engine, queue, *"abcde")
        assert bodies(engine.inspector().dead(queue)) == ["c", "d", "e"]

    def test_they_are_bounded_in_age(self, engines: Engines) -> None:
        queue, engine = name(), engines(dead_letter_max_age=1)
        bury(engine, queue, "old")
        assert bodies(engine.inspector().dead(queue)) == ["old"]
        engines.advance(1.2)
        bury(engine, queue, "new")
        assert bodies(engine.inspector().dead(queue)) == ["new"]

    def test_old_ones_leave_by_themselves(self, engines: Engines) -> None:
        queue, engine = name(), engines(dead_letter_max_age=1)
        engine.consume([queue])
        bury(engine, queue, "old", "older")
        assert engine.inspector().stats(queue).dead == 2
        engines.advance(1.0)
        until(lambda: engine.inspector().stats(queue).dead == 0)


    def test_who_looks_does_not_say_how_old_they_become(self, engines: Engines) -> None:
        queue, engine, other = name(), engines(dead_letter_max_age=3600), engines(dead_letter_max_age=1)
        bury(engine, queue, "kept")
        engines.advance(1.1)
        assert bodies(other.inspector().dead(queue)) == ["kept"]


class TestForwarding:
    def test_a_stored_one_is_removed(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        seen: list[DeadLetter] = []

        def forward(letter: DeadLetter) -> bool:
            seen.append(letter)
            return True

        engine.forward_dead_letters(queue, forward)
        engine.publish(queue, messages("a", id="job"))
        consumer = engine.consume([queue])
        consumer.dead_letter(drain(consumer, 1)[0], "why")
        until(lambda: consumer.receive(0.05) == [] and engine.inspector().stats(queue).dead == 0 and bool(seen))
        assert [(letter.queue, letter.message.body, letter.message.id, letter.reason) for letter in seen] == [
            (queue, b"a", "job", "why")]

    def test_one_that_was_not_stored_stays(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        seen: list[DeadLetter] = []

        def forward(letter: DeadLetter) -> bool:
            seen.append(letter)
            return False

        engine.forward_dead_letters(queue, forward)
        engine.publish(queue, messages("a"))
        consumer = engine.consume([queue])
        consumer.dead_letter(drain(consumer, 1)[0], "why")
        until(lambda: consumer.receive(0.05) == [] and bool(seen))
        assert bodies(engine.inspector().dead(queue)) == ["a"]

    def test_one_by_the_limit_is_forwarded_too(self, engines: Engines) -> None:
        queue, engine = name(), engines(delivery_limit=1)
        seen: list[DeadLetter] = []

        def forward(letter: DeadLetter) -> bool:
            seen.append(letter)
            return True

        engine.forward_dead_letters(queue, forward)
        engine.publish(queue, messages("a", "b"))
        consumer = engine.consume([queue])
        consumer.nack(drain(consumer, 1)[0])
        acked(consumer, drain(consumer, 1))
        until(lambda: consumer.receive(0.05) == [] and bool(seen))
        assert [letter.reason for letter in seen] == ["delivery limit of 1 reached: rejected with requeue"]

    def test_other_queues_are_left_alone(self, engines: Engines) -> None:
        queue, other, engine = name(), name(), engines()
        engine.forward_dead_letters(queue, lambda letter: True)
        bury(engine, other, "a")
        consumer = engine.consume([queue, other])
        for _ in range(3):
            consumer.receive(0.05)
        assert bodies(engine.inspector().dead(other)) == ["a"]
