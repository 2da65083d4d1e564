"""Settling, and what closing leaves behind."""

from __future__ import annotations

import threading

import pytest

from ...message import Delivery
from .kit import LEASE, Engines, acked, bodies, drain, messages, name, until


class TestSettle:
    def test_ack_removes_the_message(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", "b"))
        consumer = engine.consume([queue])
        acked(consumer, drain(consumer, 2))
        until(lambda: engine.inspector().stats(queue).in_flight == 0)
        consumer.close()
        engines.nothing(engines().consume([queue]))

    def test_an_ack_that_was_waited_for_is_in_the_store(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages(*"abcdefgh"))
        consumer = engine.consume([queue])
        got = drain(consumer, 8)
        consumer.ack_now(got[0])
        consumer.ack_now(got[0])
        assert engines().inspector().stats(queue).in_flight == 7
        consumer.nack(got[0])
        threads = [threading.Thread(target=consumer.ack_now, args=(each,)) for each in got[1:]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        stats = engines().inspector().stats(queue)
        assert (stats.ready, stats.in_flight) == (0, 0)
        assert all(each.settled for each in got)

    def test_an_ack_that_was_waited_for_outlives_its_consumer(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a"))
        consumer = engine.consume([queue])
        got, = drain(consumer, 1)
        consumer.close([got])
        consumer.ack_now(got)
        assert engines().inspector().stats(queue).in_flight == 0

    def test_settling_after_the_end_of_the_engine_does_nothing(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages(*"abcd"))
        consumer = engine.consume([queue])
        first, second, third, fourth = drain(consumer, 4)
        engine.close()
        consumer.ack(first)
        consumer.nack(second)
        consumer.dead_letter(third, "late")
        consumer.hand_back([fourth])
        assert len(drain(engines().consume([queue]), 4)) == 4

    def test_settling_twice_changes_nothing(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", "b", "c"))
        consumer = engine.consume([queue])
        first, second, third = drain(consumer, 3)
        for _ in range(2):
            consumer.ack(first)
            consumer.nack(second)
            consumer.hand_back([third])
        consumer.nack(first)
        consumer.dead_letter(first, "late")
        consumer.ack(second)
        consumer.ack(third)
        consumer.receive(0, 0)
        again = drain(consumer, 3, timeout=engines.quiet or 0.01)
        assert [(each.message.body, each.count) for each in again] == [(b"b", 2), (b"c", 1)]
        assert engine.inspector().stats(queue).dead == 0

    def test_nack_comes_back_counted_at_its_old_place(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", "b", "c", "d"))
        consumer = engine.consume([queue])
        first, second = drain(consumer, 2)
        consumer.nack(second)
        consumer.nack(first)
        again = drain(consumer, 4)
        assert bodies(again) == ["a", "b", "c", "d"]
        assert [each.count for each in again] == [2, 2, 1, 1]
        assert [each.redelivered for each in again] == [True, True, False, False]

    def test_the_token_grows_with_each_counted_delivery(self, engines: Engines) -> None:
        queue, engine = name(), engines(delivery_limit=0)
        engine.publish(queue, messages("a"))
        consumer = engine.consume([queue])
        tokens = []
        for number in range(12):
            got, = drain(consumer, 1)
            assert got.count == number + 1
            tokens.append(got.token)
            consumer.nack(got)
        assert tokens == sorted(set(tokens))

    def test_nack_with_a_delay(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", "b"))
        consumer = engine.consume([queue])
        consumer.nack(drain(consumer, 1)[0], delay=0.6)
        assert bodies(drain(consumer, 1)) == ["b"]
        engines.nothing(consumer)
        assert engine.inspector().stats(queue).delayed == 1
        engines.advance(0.6)
        again, = drain(consumer, 1)
        assert (again.message.body, again.count, again.redelivered) == (b"a", 2, True)

    def test_a_later_one_is_not_missed_by_a_consumer_that_waits(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a"))
        consumer = engine.consume([queue])
        got, = drain(consumer, 1)
        engines.nothing(consumer)
        consumer.nack(got, delay=0.3)
        engines.advance(0.3)
        assert [each.count for each in drain(consumer, 1)] == [2]

    def test_hand_back_comes_back_uncounted_at_its_old_place(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", "b", "c", "d"))
        consumer, other = engine.consume([queue]), engines().consume([queue])
        got = drain(consumer, 3)
        consumer.hand_back([got[2], got[0]])
        consumer.receive(0, 0)
        again = drain(other, 3)
        assert bodies(again) == ["a", "c", "d"]
        assert [(each.count, each.redelivered) for each in again] == [(1, True), (1, True), (1, False)]

    def test_handing_back_never_adds_up(self, engines: Engines) -> None:
        queue, engine = name(), engines(delivery_limit=2)
        engine.publish(queue, messages("a"))
        consumer = engine.consume([queue])
        for _ in range(6):
            got, = drain(consumer, 1)
            assert got.count == 1
            consumer.hand_back([got])
        assert engine.inspector().stats(queue).dead == 0

    def test_handing_back_after_a_counted_return_keeps_the_count(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a"))
        consumer = engine.consume([queue])
        consumer.nack(drain(consumer, 1)[0])
        for _ in range(3):
            got, = drain(consumer, 1)
            assert got.count == 2
            consumer.hand_back([got])

    def test_others_get_what_was_handed_back_at_once(self, engines: Engines) -> None:
        queue, engine, other = name(), engines(), engines()
        engine.publish(queue, messages("a"))
        consumer = engine.consume([queue])
        got = drain(consumer, 1)
        waiting = other.consume([queue])
        found: list[Delivery] = []
        thread = threading.Thread(target=lambda: found.extend(drain(waiting, 1)))
        thread.start()
        consumer.hand_back(got)
        thread.join(2.0)
        assert bodies(found) == ["a"]
        thread.join()

    def test_dead_letter(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", "b"))
        consumer = engine.consume([queue])
        consumer.dead_letter(drain(consumer, 1)[0], "cannot be read")
        consumer.receive(0, 0)
        until(lambda: engine.inspector().stats(queue).dead == 1)
        assert [letter.reason for letter in engine.inspector().dead(queue)] == ["cannot be read"]
        assert bodies(drain(consumer, 2, timeout=engines.quiet or 0.01)) == ["b"]

    def test_from_many_threads(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages(*(str(number) for number in range(200))))
        consumer = engine.consume([queue])
        got = drain(consumer, 200)
        ways = [lambda each: consumer.ack(each), lambda each: consumer.nack(each),
                lambda each: consumer.hand_back([each]), lambda each: consumer.dead_letter(each, "x")]
        threads = [threading.Thread(target=lambda each=each, way=ways[number % 4]: way(each))
                   for number, each in enumerate(got)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        consumer.receive(0, 0)
        until(lambda: engine.inspector().stats(queue).in_flight == 0)
        stats = engine.inspector().stats(queue)
        assert (stats.ready, stats.dead) == (100, 50)

    def test_while_another_thread_waits_in_receive(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", "b"))
        consumer = engine.consume([queue])
        first, second = drain(consumer, 2)
        found: list[Delivery] = []
        thread = threading.Thread(target=lambda: found.extend(drain(consumer, 1)))
        thread.start()
        consumer.ack(first)
        until(lambda: engine.inspector().stats(queue).in_flight == 1)
        consumer.nack(second)
        thread.join(5.0)
        assert bodies(found) == ["b"]
        assert found[0].count == 2
        thread.join()


class TestClose:
    def test_everything_unsettled_goes_back_uncounted_and_in_order(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages(*"abcdefgh"))
        consumer = engine.consume([queue])
        got = drain(consumer, 6)
        consumer.ack(got[1])
        consumer.close()
        again = drain(engines().consume([queue]), 7, timeout=2)
        assert bodies(again) == list("acdefgh")
        assert [each.count for each in again] == [1] * 7

    def test_closing_the_engine_hands_back_too(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", "b"))
        drain(engine.consume([queue]), 2)
        engine.close()
        again = drain(engines().consume([queue]), 2, timeout=2)
        assert [(each.message.body, each.count) for each in again] == [(b"a", 1), (b"b", 1)]

    def test_closing_the_engine_hands_back_what_a_consumer_kept(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", "b"))
        consumer = engine.consume([queue])
        got = drain(consumer, 2)
        consumer.close(keep=got)
        engine.close()
        consumer.ack(got[0])
        again = drain(engines().consume([queue]), 2, timeout=2)
        assert [(each.message.body, each.count) for each in again] == [(b"a", 1), (b"b", 1)]

    def test_closing_the_engine_sends_acks(self, engines: Engines) -> None:
        queue, engine, other = name(), engines(), engines()
        engine.publish(queue, messages("a", "b"))
        consumer = engine.consume([queue])
        for delivery in drain(consumer, 2):
            consumer.ack(delivery)
        engine.close()
        stats = other.inspector().stats(queue)
        assert (stats.ready, stats.in_flight) == (0, 0)

    def test_kept_deliveries_stay_owned_and_can_be_settled(self, engines: Engines) -> None:
        queue, engine, other = name(), engines(), engines()
        engine.publish(queue, messages(*"abcde"))
        consumer = engine.consume([queue])
        got = drain(consumer, 5)
        consumer.close(keep=got[:4])
        waiting = other.consume([queue])
        assert bodies(drain(waiting, 1)) == ["e"]
        for _ in range(5):
            engines.advance(LEASE / 2)
            engines.nothing(waiting)
        consumer.ack(got[0])
        consumer.nack(got[1])
        consumer.hand_back([got[2]])
        consumer.dead_letter(got[3], "x")
        again = drain(waiting, 2)
        assert [(each.message.body, each.count) for each in again] == [(b"b", 2), (b"c", 1)]
        until(lambda: other.inspector().stats(queue).in_flight == 3)
        assert bodies(other.inspector().dead(queue)) == ["d"]
        assert not any(each.lost for each in got)

    def test_another_consumer_of_the_process_is_not_concerned(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", "b"))
        first, second = engine.consume([queue]), engine.consume([queue])
        kept = drain(first, 1)
        drain(second, 1)
        second.close()
        again = drain(first, 2, timeout=engines.quiet or 0.01)
        assert bodies(again) == ["b"]
        acked(first, [*kept, *again])
        until(lambda: engine.inspector().stats(queue).in_flight == 0)

    @pytest.mark.parametrize("times", [1, 5])
    def test_rolling_restarts_lose_nothing(self, engines: Engines, times: int) -> None:
        queue, producer = name(), engines()
        texts = [str(number) for number in range(40)]
        producer.publish(queue, messages(*texts))
        done: list[str] = []
        for _ in range(times):
            engine = engines()
            consumer = engine.consume([queue])
            got = drain(consumer, 6)
            for delivery in got[:4]:
                consumer.ack(delivery)
                done += bodies([delivery])
            engine.close()
        last = engines().consume([queue])
        rest = drain(last, 40 - len(done))
        assert done + bodies(rest) == texts
        assert {each.count for each in rest} == {1}
