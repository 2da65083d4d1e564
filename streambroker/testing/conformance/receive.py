"""Receiving: limits, waiting, event loops, several queues."""

from __future__ import annotations

import select
import threading
import time

import pytest

from ...errors import Closed
from ...message import Delivery
from .kit import Engines, acked, bodies, drain, loop, messages, name, until


class TestReceive:
    def test_zero_never_waits(self, engines: Engines) -> None:
        consumer = engines().consume([name()])
        consumer.receive(0)
        start = time.monotonic()
        for _ in range(10):
            assert consumer.receive(0, 10) == []
        assert time.monotonic() - start < 1.0

    def test_never_more_is_fetched_than_there_is_room_for(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages(*"abcdefghij"))
        consumer = engine.consume([queue])
        got = drain(consumer, 3)
        assert bodies(got) == ["a", "b", "c"]
        assert engine.inspector().stats(queue).in_flight == 3
        assert bodies(drain(engines().consume([queue]), 7)) == list("defghij")

    def test_the_limit_holds_over_queues_and_priorities(self, engines: Engines) -> None:
        first, second, engine = name("a"), name("b"), engines()
        for queue in (first, second):
            for priority in range(4):
                engine.publish(queue, messages("x", "y", priority=priority))
        consumer = engine.consume([first, second])
        assert len(drain(consumer, 5)) == 5
        inspector = engine.inspector()
        assert inspector.stats(first).in_flight + inspector.stats(second).in_flight == 5

    def test_without_room_nothing_is_fetched(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a"))
        consumer = engine.consume([queue])
        assert consumer.receive(0, 0) == []
        assert consumer.receive(0, 0) == []
        assert engine.inspector().stats(queue).in_flight == 0
        assert bodies(drain(consumer, 1)) == ["a"]

    def test_room_that_is_no_more_is_left_to_others(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        consumer, other = engine.consume([queue]), engines().consume([queue])
        assert consumer.receive(0, 2) == []
        assert consumer.receive(0, 0) == []
        engine.publish(queue, messages("a", "b"))
        got = drain(other, 2)
        assert sorted(bodies(got)) == ["a", "b"]
        assert [delivery.count for delivery in got] == [1, 1]

    def test_waits_until_something_arrives(self, engines: Engines) -> None:
        queue, engine, other = name(), engines(), engines()
        consumer = engine.consume([queue])
        timer = threading.Timer(0.3, lambda: other.publish(queue, messages("a")))
        timer.start()
        start = time.monotonic()
        assert bodies(drain(consumer, 1)) == ["a"]
        assert 0.25 < time.monotonic() - start < 2.0
        timer.join()

    def test_waits_no_longer_than_asked(self, engines: Engines) -> None:
        consumer = engines().consume([name()])
        start = time.monotonic()
        assert consumer.receive(0.4) == []
        assert 0.35 < time.monotonic() - start < 1.5

    def test_an_idle_consumer_gets_a_message_at_once(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        consumer = engines().consume([queue])
        consumer.receive(engines.quiet, 1)
        for number in range(5):
            start = time.monotonic()
            engine.publish(queue, messages(str(number)))
            acked(consumer, drain(consumer, 1))
            assert time.monotonic() - start < 1.0

    def test_fetch_finds_what_was_just_published(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        consumer = engine.consume([queue])
        for number in range(30):
            engine.publish(queue, messages(str(number)))
            assert bodies(consumer.fetch()) == [str(number)]

    def test_fetch_asks_once_and_does_not_wait(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        consumer = engines().consume([queue])
        start = time.monotonic()
        assert consumer.fetch(5) == []
        engine.publish(queue, messages(*"abcde"))
        assert bodies(consumer.fetch()) == ["a"]
        assert bodies(consumer.fetch(2)) == ["b", "c"]
        assert consumer.fetch(0) == []
        assert time.monotonic() - start < 1.0
        assert engine.inspector().stats(queue).in_flight == 3
        assert bodies(drain(consumer, 2)) == ["d", "e"]

    def test_one_waits_while_another_is_served(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        consumers = [engines().consume([queue]) for _ in range(3)]
        for consumer in consumers:
            consumer.receive(0)
        engine.publish(queue, messages(*(str(number) for number in range(30))))
        got: list[Delivery] = []

        def look() -> bool:
            for consumer in consumers:
                got.extend(consumer.receive(0.05, 1))
            return len(got) >= 30

        until(look)
        assert sorted(bodies(got), key=int) == [str(number) for number in range(30)]

    def test_messages_wait_for_a_consumer_that_comes_later(self, engines: Engines) -> None:
        queue = name()
        engine = engines()
        engine.publish(queue, messages("a"))
        engine.close()
        assert bodies(drain(engines().consume([queue]), 1)) == ["a"]

    def test_consuming_before_the_queue_is_there(self, engines: Engines) -> None:
        queue = name()
        consumer = engines().consume([queue])
        engines.nothing(consumer)
        engines().publish(queue, messages("a"))
        assert bodies(drain(consumer, 1)) == ["a"]

    def test_no_ack_forgets_on_delivery(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", "b", "c"))
        consumer = engine.consume([queue], no_ack=True)
        got = drain(consumer, 2)
        assert bodies(got) == ["a", "b"]
        stats = engine.inspector().stats(queue)
        assert (stats.ready, stats.in_flight) == (1, 0)
        consumer.nack(got[0])
        consumer.close()
        assert bodies(drain(engine.consume([queue]), 3, timeout=engines.quiet or 0.01)) == ["c"]

    def test_a_closed_consumer_says_so(self, engines: Engines) -> None:
        consumer = engines().consume([name()])
        consumer.close()
        consumer.close()
        with pytest.raises(Closed):
            consumer.receive(0)

    def test_a_closed_engine_says_so(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        consumer = engine.consume([queue])
        engine.close()
        engine.close()
        with pytest.raises(Closed):
            engine.publish(queue, messages("a"))
        with pytest.raises(Closed):
            engine.consume([queue])
        with pytest.raises(Closed):
            consumer.receive(0)

    def test_closing_wakes_a_waiting_consumer(self, engines: Engines) -> None:
        engine = engines()
        consumer = engine.consume([name()])
        ended = threading.Event()

        def wait() -> None:
            with pytest.raises(Closed):
                consumer.receive(30)
            ended.set()

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        consumer.close()
        assert ended.wait(5.0)
        thread.join()


class TestEventLoop:
    def test_sources_tell_when_to_receive(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        consumer = engines().consume([queue])
        assert consumer.receive(0, 5) == []
        timer = threading.Timer(0.2, lambda: engine.publish(queue, messages("a", "b")))
        timer.start()
        assert bodies(loop(consumer, 2)) == ["a", "b"]
        timer.join()

    def test_what_is_there_already(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", "b", "c"))
        assert bodies(loop(engine.consume([queue]), 3)) == ["a", "b", "c"]

    def test_an_idle_consumer_is_not_readable_all_the_time(self, engines: Engines) -> None:
        consumer = engines().consume([name()])
        wakes, end = 0, time.monotonic() + 1.0
        while (left := end - time.monotonic()) > 0:
            consumer.receive(0, 1)
            due = consumer.due()
            readable, _, _ = select.select(list(consumer.sources()), [], [], left if due is None else min(left, due))
            wakes += bool(readable)
        assert wakes < 20

    def test_a_consumer_without_room_is_not_readable_all_the_time(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", "b"))
        consumer = engine.consume([queue])
        held = loop(consumer, 1)
        wakes, end = 0, time.monotonic() + 0.5
        while (left := end - time.monotonic()) > 0:
            consumer.receive(0, 0)
            due = consumer.due()
            readable, _, _ = select.select(list(consumer.sources()), [], [], left if due is None else min(left, due))
            wakes += bool(readable)
        assert wakes < 20
        consumer.ack(held[0])
        assert bodies(loop(consumer, 1)) == ["b"]

    def test_settling_makes_room_for_more(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages(*"abcdef"))
        consumer = engine.consume([queue])
        got = []
        for _ in range(3):
            pair = loop(consumer, 2)
            got += bodies(pair)
            assert consumer.receive(0, 0) == []
            for delivery in pair:
                consumer.ack(delivery)
        assert got == list("abcdef")

    def test_acks_leave_without_another_message(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a"))
        consumer = engine.consume([queue])
        consumer.ack(loop(consumer, 1)[0])
        for _ in range(100):
            if engine.inspector().stats(queue).in_flight == 0:
                return
            due = consumer.due()
            select.select(list(consumer.sources()), [], [], 0.1 if due is None else min(0.1, due))
            consumer.receive(0, 1)
        pytest.fail("the ack was not sent")

    def test_acks_leave_though_nobody_drives_the_consumer(self, engines: Engines) -> None:
        queue, engine, other = name(), engines(), engines()
        engine.publish(queue, messages("a"))
        consumer = engine.consume([queue])
        consumer.ack(drain(consumer, 1)[0])
        until(lambda: other.inspector().stats(queue).in_flight == 0)

    def test_a_delayed_message_arrives_without_polling(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        consumer = engines().consume([queue])
        consumer.receive(0, 1)
        engine.publish(queue, messages("a", delay=0.5))
        timer = threading.Timer(0.5, lambda: engines.advance(0.1))
        if not engines.quiet:
            engines.advance(0.45)
            timer.start()
        start = time.monotonic()
        assert bodies(loop(consumer, 1)) == ["a"]
        assert time.monotonic() - start < 1.5


class TestQueuesOfAConsumer:
    def test_add(self, engines: Engines) -> None:
        first, second, engine = name(), name(), engines()
        consumer = engine.consume([first])
        engine.publish(second, messages("b"))
        engines.nothing(consumer)
        consumer.add(second)
        consumer.add(second)
        assert bodies(drain(consumer, 1)) == ["b"]

    def test_discard(self, engines: Engines) -> None:
        first, second, engine = name(), name(), engines()
        consumer = engine.consume([first, second])
        consumer.discard(second)
        consumer.discard(second)
        engine.publish(second, messages("b"))
        engine.publish(first, messages("a"))
        assert bodies(drain(consumer, 1)) == ["a"]
        engines.nothing(consumer)
        assert engine.ready(second) == 1

    def test_discard_gives_back_what_was_fetched(self, engines: Engines) -> None:
        first, second, engine = name(), name(), engines()
        consumer = engine.consume([first, second])
        consumer.receive(0, 10)
        engine.publish(second, messages("b"))
        time.sleep(engines.quiet)
        consumer.discard(second)
        got, = drain(engines().consume([second]), 1)
        assert (got.message.body, got.count) == (b"b", 1)

    def test_what_was_received_before_discard_can_be_settled(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", "b"))
        consumer = engine.consume([queue])
        got = drain(consumer, 2)
        consumer.discard(queue)
        acked(consumer, got[:1])
        consumer.nack(got[1])
        consumer.receive(0, 0)
        again, = drain(engines().consume([queue]), 1)
        assert (again.message.body, again.count) == (b"b", 2)

    def test_no_queue_at_all(self, engines: Engines) -> None:
        consumer = engines().consume([])
        assert consumer.receive(0.05) == []
        assert consumer.receive(0) == []

    @pytest.mark.parametrize("strategy", ["round_robin", "sorted", "priority"])
    def test_order_of_queues(self, engines: Engines, strategy: str) -> None:
        first, second, engine = name("b"), name("a"), engines(queue_order_strategy=strategy)
        engine.publish(first, messages(*"111111"))
        engine.publish(second, messages(*"222222"))
        consumer = engine.consume([first, second])
        order = []
        for _ in range(12):
            got = drain(consumer, 1)
            order += bodies(got)
            acked(consumer, got)
        if strategy == "sorted":
            assert order == list("222222111111")
        elif strategy == "priority":
            assert order == list("111111222222")
        else:
            assert set(order[:4]) == {"1", "2"}, "one queue had to wait for the other"
