"""The delivery limit: who goes to the dead letters, and who never does."""

from __future__ import annotations

import pytest

from ...engine import Engine
from ...message import DeadLetter, QueueSpec
from .kit import LEASE, MARGIN, Engines, acked, bodies, drain, messages, name, until


def dead(engine: Engine, queue: str) -> list[str]:
    return bodies(engine.inspector().dead(queue))


class TestRejected:
    def test_reject_at_the_limit_is_the_end(self, engines: Engines) -> None:
        queue, engine = name(), engines(delivery_limit=3)
        engine.publish(queue, messages("a", "b"))
        consumer = engine.consume([queue])
        for count in (1, 2, 3):
            got, = drain(consumer, 1)
            assert (got.message.body, got.count) == (b"a", count)
            consumer.nack(got)
        assert bodies(drain(consumer, 2, timeout=engines.quiet or 0.01)) == ["b"]
        letter, = engine.inspector().dead(queue)
        assert letter.reason == "delivery limit of 3 reached: rejected with requeue"
        assert (letter.message.body, letter.count) == (b"a", 3)

    def test_a_delay_does_not_avoid_it(self, engines: Engines) -> None:
        queue, engine = name(), engines(delivery_limit=2)
        engine.publish(queue, messages("a"))
        consumer = engine.consume([queue])
        consumer.nack(drain(consumer, 1)[0], delay=0.2)
        engines.advance(0.2)
        got, = drain(consumer, 1)
        assert got.count == 2
        consumer.nack(got, delay=0.2)
        consumer.receive(0, 0)
        until(lambda: dead(engine, queue) == ["a"])
        assert engine.inspector().stats(queue).delayed == 0

    @pytest.mark.parametrize("limit", [None, 0])
    def test_off(self, engines: Engines, limit: int | None) -> None:
        queue, engine = name(), engines(delivery_limit=limit)
        engine.publish(queue, messages("a"))
        consumer = engine.consume([queue])
        for count in range(1, 12):
            got, = drain(consumer, 1)
            assert got.count == count
            consumer.nack(got)

    def test_the_limit_of_the_queue_goes_before_the_option(self, engines: Engines) -> None:
        strict, free, engine = name(), name(), engines(delivery_limit=3)
        engine.declare(QueueSpec(strict, delivery_limit=1))
        engine.declare(QueueSpec(free, delivery_limit=0))
        engine.publish(strict, messages("a"))
        engine.publish(free, messages("b"))
        consumer = engines(delivery_limit=3).consume([strict])
        consumer.nack(drain(consumer, 1)[0])
        consumer.receive(0, 0)
        until(lambda: dead(engine, strict) == ["a"])
        other = engine.consume([free])
        for _ in range(6):
            other.nack(drain(other, 1)[0])
        assert dead(engine, free) == []


class TestKilled:
    def test_a_message_that_kills_alone_is_buried_at_the_limit(self, engines: Engines) -> None:
        queue, watcher = name(), engines(delivery_limit=3)
        watcher.publish(queue, messages("poison"))
        holder = ""
        for count in (1, 2, 3):
            mortal = engines.mortal(delivery_limit=3)
            taken, = mortal.take(queue, 1, LEASE + MARGIN)
            assert taken.count == count
            holder = mortal.holder
            mortal.die()
            engines.advance(LEASE)
        told: list[DeadLetter] = []
        watcher.watch_convictions(queue, told.append)
        waiting = watcher.consume([queue])
        waiting.receive(0)
        until(lambda: dead(watcher, queue) == ["poison"], LEASE + MARGIN)
        letter, = watcher.inspector().dead(queue)
        assert letter.reason == "delivery limit of 3 reached: its worker died"
        until(lambda: waiting.receive(0) == [] and bool(told))
        assert [(each.queue, each.message.body, each.reason, each.count) for each in told] == [
            (queue, b"poison", letter.reason, letter.count)]
        assert (letter.count, letter.holder) == (3, holder)
        engines.nothing(waiting)

    def test_neighbours_never_die_for_it(self, engines: Engines) -> None:
        queue, watcher = name(), engines(delivery_limit=3)
        watcher.publish(queue, messages("poison", *"abcde"))
        finished: list[str] = []
        mortal, deaths = engines.mortal(delivery_limit=3), 0
        for _ in range(40):
            taken = mortal.take(queue, 6, 2.0 if engines.quiet else 0.01)
            if any(each.body == b"poison" for each in taken):
                mortal.die()
                engines.advance(LEASE)
                mortal, deaths = engines.mortal(delivery_limit=3), deaths + 1
                continue
            finished += [each.body.decode() for each in taken]
            mortal.settle("ack", *(each.id for each in taken))
            if len(finished) == 5:
                break
        assert sorted(finished) == list("abcde")
        assert dead(watcher, queue) == ["poison"]
        assert deaths == 3

    def test_a_holder_gets_one_last_chance_at_a_time(self, engines: Engines) -> None:
        queue, engine = name(), engines(delivery_limit=2)
        engine.publish(queue, messages(*"abc"))
        consumer = engine.consume([queue])
        for delivery in drain(consumer, 3):
            consumer.nack(delivery)
        engine.publish(queue, messages("new"))
        got = drain(consumer, 4, timeout=engines.quiet or 0.01)
        assert sorted(bodies(got)) == ["a", "new"]
        another, = drain(engines(delivery_limit=2).consume([queue]), 3, timeout=0.9 * LEASE if engines.quiet else 0.01)
        acked(consumer, [each for each in got if each.message.body == b"a"])
        last, = drain(consumer, 1)
        assert sorted([(another.message.body, another.count), (last.message.body, last.count)]) == [
            (b"b", 2), (b"c", 2)]

    def test_a_delayed_reject_gets_a_last_chance_too(self, engines: Engines) -> None:
        queue, engine = name(), engines(delivery_limit=2)
        engine.publish(queue, messages("a", "b"))
        consumer = engine.consume([queue])
        for delivery in drain(consumer, 2):
            consumer.nack(delivery, delay=0.2)
        engines.advance(0.3)
        got = drain(consumer, 1)
        assert [each.count for each in got] == [2]
        engines.nothing(consumer)
        acked(consumer, got)
        assert [each.count for each in drain(consumer, 1)] == [2]

    def test_a_last_chance_that_was_handed_back_is_as_before(self, engines: Engines) -> None:
        queue, engine = name(), engines(delivery_limit=2)
        engine.publish(queue, messages("a", "b"))
        consumer = engine.consume([queue])
        for delivery in drain(consumer, 2):
            consumer.nack(delivery)
        for _ in range(4):
            got = drain(consumer, 2, timeout=engines.quiet or 0.01)
            assert [each.count for each in got] == [2]
            consumer.hand_back(got)
        assert dead(engine, queue) == []
        consumer.close()
        again = drain(engines(delivery_limit=2).consume([queue]), 1)
        assert [each.count for each in again] == [2]

    def test_a_last_chance_in_company_is_not_convicted_but_tried_alone(self, engines: Engines) -> None:
        queue, watcher = name(), engines(delivery_limit=2)
        watcher.publish(queue, messages("suspect"))
        first = watcher.consume([queue])
        first.nack(drain(first, 1)[0])
        first.close()
        mortal = engines.mortal(delivery_limit=2)
        watcher.publish(queue, messages("company"))
        assert len(mortal.take(queue, 2)) == 2
        mortal.die()
        engines.advance(LEASE)
        second = engines.mortal(delivery_limit=2)
        taken = second.take(queue, 2, LEASE + 3.0 if engines.quiet else 0.1)
        assert dead(watcher, queue) == []
        assert len(taken) == 1, "the suspect had company in its strict trial"
        second.die()
        engines.advance(LEASE)
        third = engines.mortal(delivery_limit=2)
        rest = third.take(queue, 2, LEASE + 3.0 if engines.quiet else 0.1)
        assert len(rest) == 1
        assert dead(watcher, queue) == [taken[0].body.decode()]

    def test_a_strict_trial_ends_after_a_lease(self, engines: Engines) -> None:
        queue, watcher = name(), engines(delivery_limit=2)
        watcher.publish(queue, messages("suspect"))
        first = watcher.consume([queue])
        first.nack(drain(first, 1)[0])
        first.close()
        mortal = engines.mortal(delivery_limit=2)
        watcher.publish(queue, messages("company"))
        assert len(mortal.take(queue, 2)) == 2
        mortal.die()
        engines.advance(LEASE)
        survivor = engines(delivery_limit=2).consume([queue])
        alone = drain(survivor, 1, LEASE + MARGIN)
        watcher.publish(queue, messages("fresh"))
        engines.nothing(survivor)
        engines.advance(LEASE)
        assert sorted(bodies(drain(survivor, 2, LEASE + MARGIN))) == ["company", "fresh"]
        acked(survivor, alone)
        assert dead(watcher, queue) == []

    def test_a_strict_trial_waits_until_the_holder_has_nothing_else(self, engines: Engines) -> None:
        queue, watcher = name(), engines(delivery_limit=2)
        watcher.publish(queue, messages("suspect"))
        first = watcher.consume([queue])
        first.nack(drain(first, 1)[0])
        first.close()
        mortal = engines.mortal(delivery_limit=2)
        watcher.publish(queue, messages("company"))
        assert len(mortal.take(queue, 2)) == 2
        survivor = engines(delivery_limit=2).consume([queue])
        watcher.publish(queue, messages("other"))
        other = drain(survivor, 1)
        mortal.die()
        back = engines.recovered(survivor, 1)
        assert bodies(back) == ["company"]
        acked(survivor, back)
        watcher.publish(queue, messages("fresh"))
        engines.nothing(survivor)
        acked(survivor, other)
        suspect = drain(survivor, 1)
        assert bodies(suspect) == ["suspect"]
        engines.nothing(survivor)
        acked(survivor, suspect)
        assert bodies(drain(survivor, 1)) == ["fresh"]

    def test_nobody_waits_longer_than_a_lease_for_a_strict_trial(self, engines: Engines) -> None:
        queue, watcher = name(), engines(delivery_limit=2)
        watcher.publish(queue, messages("suspect"))
        first = watcher.consume([queue])
        first.nack(drain(first, 1)[0])
        first.close()
        mortal = engines.mortal(delivery_limit=2)
        assert len(mortal.take(queue, 1)) == 1
        watcher.publish(queue, messages("company"))
        assert len(mortal.take(queue, 1)) == 1
        survivor = engines(delivery_limit=2).consume([queue])
        watcher.publish(queue, messages("long"))
        assert bodies(drain(survivor, 1)) == ["long"]
        mortal.die()
        acked(survivor, engines.recovered(survivor, 1))
        engines.nothing(survivor)
        engines.advance(LEASE)
        watcher.publish(queue, messages("fresh"))
        assert sorted(bodies(drain(survivor, 2, LEASE + MARGIN))) == ["fresh", "suspect"]

    def test_a_long_one_is_waited_for_once(self, engines: Engines) -> None:
        queue, watcher = name(), engines(delivery_limit=1)
        watcher.publish(queue, messages("long"))
        survivor = watcher.consume([queue])
        long = drain(survivor, 1)
        watcher.publish(queue, messages(*"abc"))
        mortal = engines.mortal(delivery_limit=1)
        assert len(mortal.take(queue, 3)) == 3
        mortal.die()
        engines.advance(LEASE)
        engines.nothing(survivor)
        engines.advance(LEASE)
        suspects = drain(survivor, 1, 2 * LEASE + MARGIN)
        for _ in range(2):
            engines.nothing(survivor)
            acked(survivor, suspects[-1:])
            suspects += drain(survivor, 1, LEASE / 2)
        acked(survivor, [*suspects[-1:], *long])
        assert bodies(suspects) == list("abc")
        assert dead(watcher, queue) == []

    def test_new_messages_are_not_suspect_though_one_delivery_is_allowed(self, engines: Engines) -> None:
        queue, engine = name(), engines(delivery_limit=1)
        engine.publish(queue, messages(*"abc"))
        consumer = engine.consume([queue])
        got = drain(consumer, 3)
        assert bodies(got) == list("abc")
        consumer.hand_back(got)
        assert bodies(drain(consumer, 3)) == list("abc")

    def test_from_a_limit_of_four_on_it_takes_two_lost_trials(self, engines: Engines) -> None:
        """A worker that was killed from outside convicts nobody by itself."""
        queue, watcher = name(), engines(delivery_limit=4)
        watcher.publish(queue, messages("a"))
        first = watcher.consume([queue])
        for _ in range(2):
            first.nack(drain(first, 1)[0])
        got = drain(first, 1)
        assert [(each.message.body, each.count) for each in got] == [(b"a", 3)]
        first.hand_back(got)
        first.close()
        for count in (3, 4):
            mortal = engines.mortal(delivery_limit=4)
            taken, = mortal.take(queue, 1, LEASE + MARGIN)
            assert (taken.body, taken.count) == (b"a", count)
            assert dead(watcher, queue) == []
            mortal.die()
            engines.advance(LEASE)
        waiting = watcher.consume([queue])
        watcher.publish(queue, messages("b"))
        assert bodies(drain(waiting, 1, LEASE + MARGIN)) == ["b"]
        until(lambda: dead(watcher, queue) == ["a"], LEASE + MARGIN)

    def test_a_plain_kill_convicts_nobody(self, engines: Engines) -> None:
        queue, watcher = name(), engines(delivery_limit=5)
        texts = [str(number) for number in range(50)]
        watcher.publish(queue, messages(*texts))
        mortal = engines.mortal(delivery_limit=5)
        assert len(mortal.take(queue, 50)) == 50
        mortal.die()
        got = engines.recovered(watcher.consume([queue]), 50)
        assert sorted(bodies(got), key=int) == texts
        assert dead(watcher, queue) == []
