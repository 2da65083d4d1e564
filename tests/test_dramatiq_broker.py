"""The broker as Dramatiq uses it; on the memory engine here, on real servers in integration/test_dramatiq_stores.py."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.errors import QueueJoinTimeout
from dramatiq.middleware import Retries

from streambroker.dramatiq import StreamBroker
from streambroker.dramatiq.bodies import head_of
from streambroker.errors import ConfigurationError, MessageTooLarge
from streambroker.message import DeadLetter, Message
from tests.dramatiq_rig import Brokers, MemoryBroker, Signals, message, take, until, working


@pytest.fixture
def brokers() -> Iterator[Brokers]:
    made = Brokers(MemoryBroker, f"memory://{uuid.uuid4().hex}")
    yield made
    made.close()


@pytest.fixture
def broker(brokers: Brokers) -> StreamBroker:
    made = brokers()
    made.declare_queue("default")
    return made


def letters(broker: StreamBroker, queue: str = "default") -> list[DeadLetter]:
    return list(broker.engine.inspector().dead(queue))


def counts(broker: StreamBroker) -> tuple[int, int, int]:
    return broker.get_queue_message_counts("default")


class TestDeclaring:
    def test_queues_are_canonical_and_copied(self, broker: StreamBroker) -> None:
        seen: list[str] = []

        class Watch(dramatiq.Middleware):
            def before_declare_queue(self, broker: Any, queue_name: str) -> None:
                seen.append(f"before {queue_name}")

            def after_declare_queue(self, broker: Any, queue_name: str) -> None:
                seen.append(f"after {queue_name}")

            def after_declare_delay_queue(self, broker: Any, queue_name: str) -> None:
                seen.append(f"delay {queue_name}")

        broker.add_middleware(Watch())
        assert seen == ["after default"]
        broker.declare_queue("other")
        broker.declare_queue("other")
        assert seen == ["after default", "before other", "after other"]
        broker.get_declared_queues().clear()
        assert broker.get_declared_queues() == {"default", "other"}
        assert broker.get_declared_delay_queues() == set()

    def test_middleware(self, brokers: Brokers) -> None:
        assert any(isinstance(each, Retries) for each in brokers().middleware)
        assert brokers(middleware=[]).middleware == []


class TestSignals:
    def test_a_retry_that_fails_again(self, broker: StreamBroker) -> None:
        signals = Signals()
        broker.add_middleware(signals)

        @dramatiq.actor(broker=broker, max_retries=1, min_backoff=50, max_backoff=50)
        def fails() -> None:
            raise RuntimeError("always")

        with working(broker):
            fails.send()
            until(lambda: "after_nack" in signals.seen)
        delay = next(each for each in signals.seen if each.startswith("before_enqueue") and "None" not in each)
        assert signals.seen == [
            "before_enqueue None", "after_enqueue None", "before_process", "after_process exception", delay,
            delay.replace("before", "after"), "before_ack", "after_ack", "before_process", "after_process exception",
            "before_nack", "after_nack"]


class TestReceiving:
    def test_none_in_time_with_full_prefetch(self, broker: StreamBroker) -> None:
        for number in range(4):
            broker.enqueue(message(number))
        consumer = broker.consume("default", prefetch=3, timeout=150)
        got = take(consumer, 3)
        start = time.monotonic()
        assert next(consumer) is None
        assert 0.1 < time.monotonic() - start < 1
        consumer.ack(got[0])
        assert [each.args for each in take(consumer, 1)] == [(3,)]

    def test_it_arrives_as_it_was_returned(self, broker: StreamBroker) -> None:
        sent = broker.enqueue(message(1, "é", None, flag=True))
        consumer = broker.consume("default", timeout=100)
        got, = take(consumer, 1)
        assert got == sent
        assert (got.options, got.message_id, got.message_timestamp) == (
            {"flag": True}, sent.message_id, sent.message_timestamp)
        assert (got.delivery_count, got.redelivered) == (1, False)

    def test_one_id_twice_is_two_messages(self, broker: StreamBroker) -> None:
        again = message(1)
        broker.enqueue(again)
        broker.enqueue(again)
        assert len(take(broker.consume("default", prefetch=5, timeout=100), 2)) == 2

    def test_one_thread_works_in_the_order_of_sending(self, broker: StreamBroker) -> None:
        ran: list[int] = []

        @dramatiq.actor(broker=broker)
        def work(number: int) -> None:
            ran.append(number)

        for number in range(100):
            work.send(number)
        with working(broker, threads=1):
            until(lambda: len(ran) == 100)
        assert ran == list(range(100))

    def test_what_others_have_meanwhile_is_not_started(self, broker: StreamBroker) -> None:
        """A process that was taken for dead still has in memory what it had not begun. It leaves that to its new
        holder: it neither runs it nor acknowledges it nor tells of it."""
        ran: list[int] = []
        told: list[int] = []
        begun, go = threading.Event(), threading.Event()

        class Tells(dramatiq.Middleware):
            def after_skip_message(self, broker: Any, message: Any) -> None:
                told.append(message.args[0])

        broker.add_middleware(Tells())

        @dramatiq.actor(broker=broker)
        def work(number: int) -> None:
            begun.set()
            go.wait(10)
            ran.append(number)

        with working(broker, threads=1):
            work.send(0)
            assert begun.wait(10)
            work.send(1)
            until(lambda: len(broker.unsettled("default")) == 2)
            taken, = [each for each in broker.unsettled("default").messages() if each.args == (1,)]
            taken.delivery.take_away()
            work.send(2)
            go.set()
            until(lambda: ran == [0, 2] and not len(broker.unsettled("default")))
            # acknowledgements go some ms later
            until(lambda: broker.engine.inspector().stats("default").in_flight == 1)
        assert told == []

    def test_the_prefetch_counts_what_earlier_consumers_brought(self, broker: StreamBroker) -> None:
        for number in range(6):
            broker.enqueue(message(number))
        first = broker.consume("default", prefetch=4, timeout=100)
        held = take(first, 3)
        first.close()
        second = broker.consume("default", prefetch=4, timeout=100)
        assert [each.args for each in take(second, 2, 1)] == [(3,)]
        for each in held:
            second.ack(each)
        assert [each.args for each in take(second, 2)] == [(4,), (5,)]

    def test_a_message_that_names_another_queue_runs_and_harms_no_thread(self, broker: StreamBroker) -> None:
        ran: list[int] = []

        @dramatiq.actor(broker=broker)
        def work(number: int) -> None:
            ran.append(number)

        stray = work.message(1).copy(queue_name="default.DQ")
        broker.engine.publish("default", [Message(stray.encode())])
        with working(broker, threads=1) as worker:
            until(lambda: ran == [1])
            work.send(2)
            until(lambda: ran == [1, 2])
            assert all(thread.is_alive() for thread in worker.workers)

    @pytest.mark.parametrize("body", [
        b"", b"\xff\xfe", b"[1, 2]", b'{"x": 1}',
        json.dumps({**message().asdict(), "options": None}).encode(),
        json.dumps({**message().asdict(), "kwargs": 5}).encode(),
        json.dumps({**message().asdict(), "actor_name": ["a"]}).encode(),
        json.dumps({**message().asdict(), "half a pair \ud800": 1}).encode(),
        *(json.dumps({**message().asdict(), "options": {name: value}}).encode() for name, value in (
            ("retries", "x"), ("retries", None), ("max_retries", 0.5), ("max_backoff", "soon"), ("time_limit", {}),
            ("max_age", float("nan")), ("min_backoff", float("inf")),
            ("throws", "ValueError"), ("min_backoff", 10 ** 400)))])
    def test_what_cannot_be_decoded_dies_as_it_is(self, broker: StreamBroker, body: bytes) -> None:
        broker.enqueue(message(1))
        broker.engine.publish("default", [Message(body)])
        broker.enqueue(message(2))
        consumer = broker.consume("default", prefetch=5, timeout=100)
        assert [each.args for each in take(consumer, 2)] == [(1,), (2,)]
        until(lambda: counts(broker)[2] == 1)
        letter, = letters(broker)
        assert letter.message.body == body
        assert letter.reason.startswith("undecodable: ")


    def test_usual_options_pass(self, broker: StreamBroker) -> None:
        options = {"retries": 3, "max_retries": None, "min_backoff": 5, "max_backoff": None, "time_limit": float("inf"),
                   "max_age": 1.5, "throws": None}
        broker.enqueue(message(1).copy(options=options))
        got, = take(broker.consume("default", timeout=100), 1)
        assert got.options == {name: value for name, value in options.items() if name != "max_backoff"}


class TestDelay:
    def test_delay_is_the_stores(self, broker: StreamBroker) -> None:
        sent = broker.enqueue(message(1), delay=1000)
        consumer = broker.consume("default", timeout=100)
        assert counts(broker) == (0, 1, 0)
        assert next(consumer) is None
        got, = take(consumer, 1)
        assert got == sent

    def test_an_eta_beyond_all_times_is_a_dead_letter(self, broker: StreamBroker) -> None:
        for eta in (10 ** 400, float("inf")):
            broker.engine.publish("default", [Message(message(1).copy(options={"eta": eta}).encode())])
        broker.engine.publish("default", [Message(message(2).copy(options={"eta": -10 ** 400}).encode())])
        got, = take(broker.consume("default", prefetch=5, timeout=100), 1)
        assert got.args == (2,)
        until(lambda: counts(broker)[2] == 2)
        assert all("ten years" in letter.reason for letter in letters(broker))

    def test_delay_of_nothing(self, broker: StreamBroker) -> None:
        broker.enqueue(message(1), delay=0)
        assert len(take(broker.consume("default", timeout=100), 1)) == 1

    def test_many_are_due_in_their_time(self, broker: StreamBroker) -> None:
        late: list[float] = []

        @dramatiq.actor(broker=broker)
        def work(due: float) -> None:
            late.append(time.time() - due)

        for number in range(100):
            delay = 1000 + number
            work.send_with_options(args=(time.time() + delay / 1000,), delay=delay)
        with working(broker, threads=4):
            until(lambda: len(late) == 100)
        assert -0.01 < min(late) <= max(late) < 0.5

    @pytest.mark.parametrize("delay", [float("inf"), float("nan"), 11 * 365 * 86_400_000])
    def test_too_long(self, broker: StreamBroker, delay: int) -> None:
        with pytest.raises(ValueError, match="ten years"):
            broker.enqueue(message(1), delay=delay)
        assert counts(broker) == (0, 0, 0)

    def test_thirty_days(self, broker: StreamBroker) -> None:
        broker.enqueue(message(1), delay=30 * 86_400_000)
        waiting, = broker.engine.inspector().delayed("default")
        assert abs(waiting.due - time.time() - 30 * 86_400) < 5

    def test_an_eta_given_here_waits_in_the_store(self, broker: StreamBroker) -> None:
        start = time.time()
        broker.enqueue(message(1, eta=int(start * 1000) + 400))
        assert counts(broker) == (0, 1, 0)
        got, = take(broker.consume("default", timeout=100), 1)
        assert time.time() - start >= 0.39
        assert got.options == {}

    def test_an_eta_of_another_program_is_taken_over(self, broker: StreamBroker) -> None:
        start = time.time()
        foreign = message(1, eta=int(start * 1000) + 600, kept="yes")
        broker.engine.publish("default", [Message(foreign.encode())])
        consumer = broker.consume("default", prefetch=2, timeout=100)
        assert next(consumer) is None
        until(lambda: counts(broker) == (0, 1, 0), 0.4)
        assert not len(broker.unsettled("default"))
        got, = take(consumer, 2, 1.5)
        assert time.time() - start >= 0.59
        assert (got.options, got.message_id) == ({"kept": "yes"}, foreign.message_id)

    @pytest.mark.parametrize("eta", [None, "soon"])
    def test_an_eta_that_is_no_number_is_the_workers_business(self, broker: StreamBroker, eta: Any) -> None:
        broker.enqueue(message(1, eta=eta))
        got, = take(broker.consume("default", timeout=100), 1)
        assert got.options == {"eta": eta}

    def test_a_foreign_eta_beyond_reason_dies(self, broker: StreamBroker) -> None:
        broker.engine.publish("default", [Message(message(1, eta=1e300).encode())])
        consumer = broker.consume("default", timeout=100)
        next(consumer)
        until(lambda: counts(broker)[2] == 1)
        assert "ten years" in letters(broker)[0].reason


class TestSettling:
    def test_settling_is_idempotent_and_outlives_the_consumer(self, broker: StreamBroker) -> None:
        for number in range(3):
            broker.enqueue(message(number))
        consumer = broker.consume("default", prefetch=3, timeout=100)
        first, second, third = take(consumer, 3)
        consumer.ack(first)
        consumer.ack(first)
        consumer.nack(first)
        consumer.close()
        consumer.close()
        other = broker.consume("default", timeout=100)
        other.ack(second)
        other.requeue([second])
        other.ack(third)
        broker.join("default", timeout=5000)
        assert counts(broker) == (0, 0, 0)

    def test_with_ack_confirm_an_ack_is_in_the_store_when_it_returns(self, brokers: Brokers) -> None:
        broker, seen = brokers(ack_confirm=True), []
        looker = brokers().engine.inspector()

        class Look(dramatiq.Middleware):
            def after_ack(self, broker: Any, message: Any) -> None:
                seen.append(any(each.id == message.delivery.id for each in looker.in_flight("default")))

        broker.add_middleware(Look())

        @dramatiq.actor(broker=broker)
        def work() -> None:
            pass

        for _ in range(20):
            work.send()
        with working(broker, threads=4):
            until(lambda: len(seen) == 20)
        assert seen == [False] * 20

    def test_requeue_is_at_once_in_order_and_uncounted(self, broker: StreamBroker, brokers: Brokers) -> None:
        for number in range(5):
            broker.enqueue(message(number))
        consumer = broker.consume("default", prefetch=5, timeout=100)
        consumer.requeue(each for each in take(consumer, 3))
        consumer.requeue([])
        consumer.close()
        other = brokers().consume("default", prefetch=5, timeout=100)
        got = take(other, 5, 2)
        assert [each.args[0] for each in got] == [0, 1, 2, 3, 4]
        assert {each.delivery_count for each in got} == {1}

    def test_a_pause_keeps_what_runs(self, broker: StreamBroker, brokers: Brokers) -> None:
        started, release, ran = threading.Event(), threading.Event(), []

        @dramatiq.actor(broker=broker)
        def work() -> None:
            ran.append(1)
            started.set()
            release.wait(10)

        work.send()
        with working(broker, threads=1) as worker:
            assert started.wait(5)
            for thread in worker.consumers.values():
                thread.pause()
            until(lambda: worker.consumers["default"].paused_event.is_set())
            other = brokers().consume("default", timeout=100)
            assert next(other) is None
            release.set()
            broker.join("default", timeout=5000)
            worker.resume()
        assert ran == [1]

    def test_a_retry_that_cannot_be_stored_does_not_lose_the_message(self, brokers: Brokers) -> None:
        broker, ran = brokers(max_message_size=1000, delivery_limit=2), []

        @dramatiq.actor(broker=broker, max_retries=3, min_backoff=10)
        def work(pad: str) -> None:
            ran.append(1)
            raise RuntimeError("no")

        # no room for the number of its retries
        pad = "p" * (1000 - 30 - len(work.message("").encode() + head_of("work")))
        work.send(pad)
        with working(broker, threads=1):
            until(lambda: counts(broker) == (0, 0, 1))
        assert len(ran) == 2
        letter, = letters(broker)
        assert (letter.count, json.loads(letter.message.body)["args"]) == (2, [pad])

    @pytest.mark.parametrize("text", [100_000, 2_000_000])
    def test_what_an_error_says_may_be_long(self, brokers: Brokers, text: int) -> None:
        """It costs no retry, and no message that is kept grows by all of it. The first fits into the store."""
        broker, ran = brokers(max_message_size=200_000), []

        @dramatiq.actor(broker=broker, max_retries=2, min_backoff=10, max_backoff=10)
        def work() -> None:
            ran.append(1)
            raise RuntimeError("<html>" + "x" * text + "</html>")

        work.send()
        with working(broker, threads=1):
            until(lambda: counts(broker) == (0, 0, 1))
        assert len(ran) == 3
        letter, = letters(broker)
        options = json.loads(letter.message.body)["options"]
        assert (letter.count, letter.reason[:26], options["retries"]) == (1, "RuntimeError: <html>xxxxxx", 3)
        assert options["traceback"].startswith("Traceback (most recent call last):\n")
        assert options["traceback"].endswith("x</html>\n")
        assert len(options["traceback"]) < 70_000

    def test_a_traceback_without_room_is_left_out_of_the_retry(self, brokers: Brokers) -> None:
        broker, ran = brokers(max_message_size=1000), []

        @dramatiq.actor(broker=broker, max_retries=2, min_backoff=10, max_backoff=10)
        def work(pad: str) -> None:
            ran.append(1)
            raise RuntimeError("x" * 500)

        work.send("p" * 500)
        with working(broker, threads=1):
            until(lambda: counts(broker) == (0, 0, 1))
        assert len(ran) == 3
        letter, = letters(broker)
        assert (letter.count, letter.reason[:18]) == (1, "RuntimeError: xxxx")
        assert json.loads(letter.message.body)["args"] == ["p" * 500]


class TestDeadLetters:
    def fail(self, broker: StreamBroker, **options: Any) -> list[str]:
        ran: list[str] = []

        @dramatiq.actor(broker=broker, **options)
        def work(fixed: str) -> None:
            ran.append(fixed)
            raise KeyError("the reason")

        work.send("é")
        with working(broker):
            until(lambda: counts(broker)[2] == 1)
        return ran

    def test_kept_as_it_was_last(self, broker: StreamBroker) -> None:
        signals = Signals()
        broker.add_middleware(signals)
        assert len(self.fail(broker, max_retries=1, min_backoff=10, max_backoff=10)) == 2
        letter, = letters(broker)
        kept = json.loads(letter.message.body)
        assert letter.reason == "KeyError: 'the reason'"
        assert (kept["options"]["retries"], kept["args"], kept["queue_name"]) == (2, ["é"], "default")
        assert "KeyError: 'the reason'" in kept["options"]["traceback"]
        assert letter.message.headers["type"] == "work"
        assert kept["message_id"] == letter.message.id == signals.nacked[0].message_id

    def test_a_traceback_without_retries(self, brokers: Brokers) -> None:
        signals = Signals()

        class Fail(dramatiq.Middleware):
            def after_process_message(self, broker: Any, message: Any, *, result: Any = None,
                                      exception: Any = None) -> None:
                message.fail()

        broker = brokers(middleware=[Fail(), signals])
        self.fail(broker)
        kept = json.loads(letters(broker)[0].message.body)
        assert "KeyError: 'the reason'" in kept["options"]["traceback"]
        assert signals.nacked[0].options == {}

    def test_an_unknown_actor(self, broker: StreamBroker) -> None:
        broker.enqueue(message(1, actor="unheard"))
        with working(broker):
            until(lambda: counts(broker)[2] == 1)
        assert letters(broker)[0].reason == "ActorNotFound: unheard"

    def test_replay_starts_anew(self, broker: StreamBroker) -> None:
        ran = self.fail(broker, max_retries=1, min_backoff=10, max_backoff=10)
        inspector = broker.engine.inspector()
        assert inspector.replay("default", [each.id for each in letters(broker)]) == 1
        got, = take(broker.consume("default", timeout=100), 1)
        assert got.options == {"retries": 0}
        assert len(ran) == 2

    def test_one_by_the_limit_starts_anew_too(self, brokers: Brokers) -> None:
        broker = brokers(delivery_limit=1)
        broker.enqueue(message(1, retries=2, traceback="the second try", kept="yes"))
        consumer = broker.consume("default", timeout=100)
        got, = take(consumer, 1)
        assert (got.options["retries"], got.options["traceback"]) == (2, "the second try")
        got.source.nack(got.delivery)
        until(lambda: counts(broker)[2] == 1)
        letter, = letters(broker)
        assert json.loads(letter.message.body)["options"] == {"retries": 2, "traceback": "the second try",
                                                               "kept": "yes"}
        assert (letter.reason, letter.count) == ("delivery limit of 1 reached: rejected with requeue", 1)
        consumer.ack(got)
        broker.engine.inspector().replay("default", [letter.id])
        got, = take(consumer, 1)
        assert (got.options, got.delivery_count) == ({"retries": 0, "kept": "yes"}, 1)

    def test_flush_drops_all_three_kinds(self, broker: StreamBroker) -> None:
        self.fail(broker, max_retries=0)
        broker.enqueue(message(1))
        broker.enqueue(message(2), delay=60_000)
        assert counts(broker) == (1, 1, 1)
        broker.flush_all()
        assert counts(broker) == (0, 0, 0)


class TestJoin:
    def test_it_waits_for_what_other_processes_have(self, broker: StreamBroker, brokers: Brokers) -> None:
        other = brokers()
        broker.enqueue(message(1))
        consumer = other.consume("default", timeout=100)
        got, = take(consumer, 1)
        start = time.monotonic()
        with pytest.raises(QueueJoinTimeout):
            broker.join("default", timeout=300)
        assert 0.25 < time.monotonic() - start < 3
        consumer.ack(got)
        broker.join("default", timeout=5000)

    def test_it_waits_for_delayed_ones(self, broker: StreamBroker) -> None:
        broker.enqueue(message(1), delay=60_000)
        with pytest.raises(QueueJoinTimeout):
            broker.join("default", timeout=200)

    def test_keywords_of_other_brokers_are_taken(self, broker: StreamBroker) -> None:
        broker.join("default", timeout=5000, interval=10, min_successes=2, idle_time=10, fail_fast=True)


class TestPriority:
    def test_the_highest_goes_first(self, brokers: Brokers) -> None:
        broker = brokers(max_priority=5)
        for priority in (None, 0, 3, 5, 3):
            broker.enqueue(message(priority, **({} if priority is None else {"broker_priority": priority})))
        consumer = broker.consume("default", prefetch=1, timeout=100)
        order = []
        for _ in range(5):
            got, = take(consumer, 1)
            order.append(got.args[0])
            consumer.ack(got)
        assert order == [5, 3, 3, None, 0]

    @pytest.mark.parametrize(("most", "given"), [(None, 1), (5, 6), (5, -1), (5, True), (5, "high")])
    def test_what_cannot_be_honoured_is_refused(self, brokers: Brokers, most: int | None, given: Any) -> None:
        broker = brokers(max_priority=most)
        with pytest.raises(ConfigurationError, match="broker_priority"):
            broker.enqueue(message(1, broker_priority=given))

    @pytest.mark.parametrize("most", [0, 32, True, "5"])
    def test_how_many_there_can_be(self, brokers: Brokers, most: Any) -> None:
        with pytest.raises(ConfigurationError, match="1 to 31"):
            brokers(max_priority=most)


def test_too_large(brokers: Brokers) -> None:
    broker = brokers(max_message_size=500)
    with pytest.raises(MessageTooLarge):
        broker.enqueue(message("x" * 500))


@pytest.mark.parametrize("names", [["a.b", "a-b", "a_b", "ab"], ["q", "q.", "q..r", "Q"], ["é", "a b", "q.DQ", "q.XQ"]])
def test_queue_names_are_kept_apart(broker: StreamBroker, names: list[str]) -> None:
    for name in names:
        broker.enqueue(message(name, queue=name))
    for name in names:
        consumer = broker.consume(name, prefetch=5, timeout=100)
        got = take(consumer, 1)
        assert [(each.args[0], each.queue_name) for each in got] == [(name, name)]
        consumer.ack(got[0])
        consumer.close()
