"""Kombu's verbs on the memory engine: publishing, consuming, settling, live queues, the life of queues."""

from __future__ import annotations

import socket
import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from kombu import Connection, Consumer, Exchange, Producer, Queue, binding
from kombu.exceptions import ContentDisallowed
from kombu.mixins import ConsumerMixin

from streambroker.message import Message
from streambroker.testing.servers import wait_until
from tests.kombu_rig import Broker, drain, engine_of

JOBS = Queue("jobs", Exchange("jobs"), routing_key="jobs")


def publish(channel: Any, body: Any = "x", queue: str = "jobs", **options: Any) -> None:
    Producer(channel).publish(body, routing_key=queue, serializer="json", **options)


def stored(connection: Connection, queue: str = "jobs") -> Message:
    delivery = engine_of(connection).consume([queue], no_ack=True).fetch(1)[0]
    return delivery.message


# ------------------------------------------------------------ what travels
@pytest.mark.parametrize("body", ["text", "ünïcode", {"a": [1, None]}, 12, b"\x00\xff raw"])
def test_bodies_come_back_as_they_were(broker: Broker, body: Any) -> None:
    queue = broker.open().SimpleQueue("q")
    queue.put(body)
    assert queue.get(timeout=1).payload == body


@pytest.mark.parametrize("compression", ["gzip", "bzip2"])
def test_compression(broker: Broker, compression: str) -> None:
    queue = broker.open().SimpleQueue("q")
    queue.put({"a": "b" * 1000}, compression=compression)
    message = queue.get(timeout=1)
    assert message.payload == {"a": "b" * 1000}


def test_headers_and_properties_keep_their_types(broker: Broker) -> None:
    channel = broker.open().channel()
    now = datetime.now(timezone.utc)
    publish(channel, headers={"when": now, "raw": b"\xff", "deep": {"a": [1]}}, correlation_id="c", reply_to="r",
            priority=3)
    message = channel.basic_get("jobs")
    assert message.headers["when"] == now
    assert message.headers["raw"] == b"\xff"
    assert message.headers["deep"] == {"a": [1]}
    assert (message.properties["correlation_id"], message.properties["reply_to"]) == ("c", "r")
    assert message.properties["priority"] == message.delivery_info["priority"] == 3
    assert (message.content_type, message.content_encoding) == ("application/json", "utf-8")


def test_the_store_gets_the_body_once_and_as_it_is(broker: Broker) -> None:
    connection = broker.open()
    publish(connection.channel(), {"a": 1}, headers={"task": "add", "id": "abc"})
    message = stored(connection)
    assert message.body == b'{"a": 1}'
    assert message.id == "abc"
    assert message.headers["type"] == "add"


def test_what_cannot_be_a_message_is_refused_at_the_sender(broker: Broker) -> None:
    channel = broker.open().channel()
    with pytest.raises(TypeError, match="serializer"):
        channel.basic_publish(channel.prepare_message({"a": 1}), routing_key="jobs")
    with pytest.raises(TypeError):
        publish(channel, headers={"x": object()})
    assert channel.basic_get("jobs") is None


def test_a_plain_text_can_be_published(broker: Broker) -> None:
    channel = broker.open().channel()
    channel.basic_publish("hello", "", "jobs")
    assert channel.basic_get("jobs").decode() == "hello"


def test_a_head_that_is_none_becomes_a_dead_letter(broker: Broker) -> None:
    connection = broker.open()
    engine_of(connection).publish("jobs", [Message(b"x", b"[1]"), Message(b"y", b"\xff\xfe{")])
    channel = connection.channel()
    publish(channel, "good")
    got: list[Any] = []
    with Consumer(channel, [Queue("jobs")], callbacks=[lambda body, message: (got.append(body), message.ack())]):
        drain(connection, lambda: got)
    dead = list(engine_of(connection).inspector().dead("jobs"))
    assert got == ["good"]
    assert [letter.message.body for letter in dead] == [b"x", b"y"]
    assert all("undecodable" in letter.reason for letter in dead)


@pytest.mark.parametrize("header", [
    {"task": []}, {"id": {}}, {"retries": "x"}, {"timelimit": [1]}, {"timelimit": [None, "x"]}, {"timelimit": [-1, 2]},
    {"timelimit": [float("nan"), None]}, {"stamped_headers": 5}, {"stamped_headers": [[]]}, {"stamps": []},
    {"group": 1.5}, {"shadow": {}}])
def test_a_task_whose_headers_a_worker_cannot_read_is_a_dead_letter(broker: Broker, header: dict[str, Any]) -> None:
    connection = broker.open()
    channel = connection.channel()
    whole = {"task": "t", "id": "1", "timelimit": [None, 5], "stamped_headers": None, "retries": 0, "group": None}
    publish(channel, "bad", headers={**whole, **header})
    publish(channel, "good", headers=whole)
    publish(channel, "no task", headers=header)
    got: list[Any] = []
    with Consumer(channel, [Queue("jobs")], on_message=lambda message: (got.append(message.body), message.ack())):
        drain(connection, lambda: len(got) == 2)
    assert got == [b'"good"', b'"no task"']
    letter, = engine_of(connection).inspector().dead("jobs")
    assert letter.message.body == b'"bad"'
    assert f"header {next(iter(header))} cannot be" in letter.reason


def test_a_body_that_cannot_be_decoded_becomes_a_dead_letter_when_it_is_acknowledged(broker: Broker) -> None:
    """Celery acknowledges such a message, which would destroy it."""
    connection = broker.open()
    channel = connection.channel()
    channel.basic_publish(channel.prepare_message("{no json", content_type="application/json",
                                                  content_encoding="utf-8"), routing_key="jobs")
    seen: list[Any] = []
    with Consumer(channel, [Queue("jobs")], callbacks=[lambda body, message: None],
                  on_decode_error=lambda message, error: (seen.append(error), message.ack())):
        drain(connection, lambda: seen)
    letter, = engine_of(connection).inspector().dead("jobs")
    assert letter.message.body == b"{no json"
    assert "undecodable" in letter.reason


def test_disallowed_content_is_not_lost(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    Producer(channel).publish({"a": 1}, routing_key="jobs", serializer="pickle")
    with Consumer(channel, [Queue("jobs")], callbacks=[lambda body, message: None], accept=["json"]), \
            pytest.raises(ContentDisallowed):
        connection.drain_events(timeout=1)
    channel.close()
    assert engine_of(connection).ready("jobs") == 1


# ------------------------------------------------------------ priority, delay, expiry
@pytest.mark.parametrize(("order", "wanted"), [("redis", [0, 3, 6, 9]), ("amqp", [9, 6, 3, 0])])
def test_priority_order(broker: Broker, order: str, wanted: list[int]) -> None:
    channel = broker.open(priority_order=order).channel()
    for priority in (6, 9, 0, 3):
        publish(channel, priority, priority=priority)
    assert [channel.basic_get("jobs", no_ack=True).decode() for _ in range(4)] == wanted


def test_priorities_outside_the_range_are_clamped_and_told_once(broker: Broker, caplog: Any) -> None:
    channel = broker.open().channel()
    for priority in (50, -1, 4, None, 99):
        publish(channel, priority, priority=priority)
    assert [channel.basic_get("jobs", no_ack=True).decode() for _ in range(5)] == [-1, None, 4, 50, 99]
    assert caplog.text.count("outside 0 to 9") == 1


@pytest.mark.parametrize(("eta", "waits"), [
    (lambda now: (now + timedelta(hours=1)).isoformat(), 3600),
    (lambda now: (now + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ"), 3600),
    (lambda now: (now + timedelta(days=60)).isoformat(), 60 * 86400),
    # no zone: taken for the zone where it is earliest, so never late anywhere
    (lambda now: (now + timedelta(hours=20)).replace(tzinfo=None).isoformat(), 6 * 3600),
    (lambda now: (now + timedelta(hours=1)).replace(tzinfo=None).isoformat(), 0),
    (lambda now: (now - timedelta(hours=1)).isoformat(), 0),
    (lambda now: (now + timedelta(seconds=1)).isoformat(), 1),
    (lambda now: "tomorrow", 0),
    (lambda now: 17, 0),
])
def test_eta(broker: Broker, eta: Any, waits: float) -> None:
    connection = broker.open()
    now = datetime.now(timezone.utc)
    publish(connection.channel(), headers={"task": "t", "id": "i", "eta": eta(now)})
    delayed = list(engine_of(connection).inspector().delayed("jobs"))
    if waits:
        assert delayed[0].due == pytest.approx(now.timestamp() + waits, abs=2)
    else:
        assert delayed == []
        assert engine_of(connection).ready("jobs") == 1


def test_expiration_is_honoured_but_for_tasks(broker: Broker) -> None:
    connection = broker.open()
    publish(connection.channel(), "plain", expiration=0.01)
    publish(connection.channel(), "task", expiration=0.01, headers={"task": "t"})
    time.sleep(0.05)  # the store's clock is the thing under test
    assert stored(connection).body == b'"task"'


def test_message_ttl_of_a_queue(broker: Broker) -> None:
    connection = broker.open()
    Queue("short", message_ttl=0.01)(connection.channel()).declare()
    publish(connection.channel(), queue="short")
    time.sleep(0.05)  # the store's clock is the thing under test
    assert connection.channel().basic_get("short") is None


# ------------------------------------------------------------ consuming and settling
def test_prefetch_bounds_what_is_out(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    for number in range(10):
        publish(channel, number)
    got: list[Any] = []
    consumer = Consumer(channel, [Queue("jobs")], callbacks=[lambda body, message: got.append(message)],
                        prefetch_count=3)
    consumer.consume()
    connection.drain_events(timeout=1)
    started = time.monotonic()
    with pytest.raises(socket.timeout):
        connection.drain_events(timeout=2)
    assert time.monotonic() - started < 1
    assert len(got) == 3
    assert engine_of(connection).ready("jobs") == 7
    got[0].ack()
    drain(connection, lambda: len(got) == 4)
    consumer.qos(prefetch_count=5)
    drain(connection, lambda: len(got) == 6)


def test_a_prefetch_that_is_raised_for_a_moment_brings_nothing(broker: Broker) -> None:
    """Celery does that for each task whose eta is over."""
    connection = broker.open()
    channel = connection.channel()
    publish(channel, 1)
    got: list[Any] = []

    def on_message(body: Any, message: Any) -> None:
        got.append(message)
        consumer.qos(prefetch_count=2)

    consumer = Consumer(channel, [Queue("jobs")], callbacks=[on_message], prefetch_count=1)
    consumer.consume()
    publish(channel, 2)
    connection.drain_events(timeout=1)
    consumer.qos(prefetch_count=1)
    with pytest.raises(socket.timeout):
        connection.drain_events(timeout=0.2)
    assert len(got) == 1
    assert engine_of(connection).ready("jobs") == 1
    consumer.qos(prefetch_count=2)
    drain(connection, lambda: len(got) == 2)


def test_patched_can_consume_is_asked_before_each_message(broker: Broker) -> None:
    """What Celery's worker_disable_prefetch does."""
    connection = broker.open()
    channel = connection.channel()
    for number in range(5):
        publish(channel, number)
    got: list[Any] = []
    Consumer(channel, [Queue("jobs")], callbacks=[lambda body, message: got.append(message)],
             prefetch_count=4).consume()
    channel.qos.can_consume = lambda: len(got) < 2
    drain(connection, lambda: len(got) == 2)
    with pytest.raises(socket.timeout):
        connection.drain_events(timeout=0.1)
    assert len(got) == 2
    assert engine_of(connection).ready("jobs") == 3


def test_time_out_of_zero_gives_what_is_there_and_never_blocks(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    got: list[Any] = []
    Consumer(channel, [Queue("jobs")], callbacks=[lambda body, message: got.append(body)], no_ack=True).consume()
    started = time.monotonic()
    with pytest.raises(socket.timeout):
        connection.drain_events(timeout=0)
    assert time.monotonic() - started < 0.5
    publish(channel)
    wait_until(lambda: drained(connection) and got, 5, "the message")
    assert got == ["x"]


def drained(connection: Connection) -> bool:
    try:
        connection.drain_events(timeout=0)
    except TimeoutError:
        return False
    return True


def test_one_reply_a_drain(broker: Broker) -> None:
    """Kombu's mailboxes count drains: a limit of two must not wait for a third."""
    connection = broker.open()
    channel = connection.channel()
    got: list[Any] = []
    Consumer(channel, [Queue("jobs")], callbacks=[lambda body, message: got.append(body)], no_ack=True).consume()
    publish(channel, 1)
    publish(channel, 2)
    connection.drain_events(timeout=1)
    assert got == [1]
    connection.drain_events(timeout=1)
    assert got == [1, 2]


def test_settling_twice_and_on_closed_channels_is_harmless(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    publish(channel)
    message = channel.basic_get("jobs")
    tag = message.delivery_tag
    message.ack()
    channel.basic_ack(tag)
    channel.basic_reject(tag, requeue=True)
    channel.basic_ack("never seen")
    channel.close()
    channel.close()
    channel.basic_ack(tag)
    assert engine_of(connection).ready("jobs") == 0


def test_requeue_counts_and_keeps_the_place(broker: Broker) -> None:
    channel = broker.open().channel()
    publish(channel, 1)
    publish(channel, 2)
    message = channel.basic_get("jobs")
    assert (message.delivery_info["redelivered"], message.headers) == (False, {})
    message.requeue()
    again = channel.basic_get("jobs")
    assert again.decode() == 1
    assert again.delivery_info["redelivered"] is again.headers["redelivered"] is True
    assert again.headers["x-delivery-count"] == again.delivery_info["delivery_count"] == 2
    assert again.delivery_tag != message.delivery_tag


def test_the_delivery_limit_ends_a_message_that_always_comes_back(broker: Broker) -> None:
    connection = broker.open(delivery_limit=3)
    channel = connection.channel()
    publish(channel)
    for _ in range(3):
        channel.basic_get("jobs").requeue()
    assert channel.basic_get("jobs") is None
    assert [letter.count for letter in engine_of(connection).inspector().dead("jobs")] == [3]


def test_a_requeue_after_the_consumer_was_cancelled_is_no_failure(broker: Broker) -> None:
    """A worker that is told to stop at once cancels, then rejects what runs."""
    connection = broker.open()
    channel = connection.channel()
    publish(channel)
    got: list[Any] = []
    consumer = Consumer(channel, [Queue("jobs")], callbacks=[lambda body, message: got.append(message)])
    consumer.consume()
    drain(connection, lambda: got)
    consumer.cancel()
    got[0].reject(requeue=True)
    assert channel.basic_get("jobs").headers["x-delivery-count"] == 1


def test_rejected_for_good(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    publish(channel, headers={"task": "my.task"})
    channel.basic_get("jobs").reject()
    letter, = engine_of(connection).inspector().dead("jobs")
    assert "my.task" in letter.reason
    assert letter.message.body == b'"x"'


def test_rejected_into_the_dead_letter_exchange(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    Queue("dlq", Exchange("dlx"), routing_key="dead")(channel).declare()
    queue = Queue("jobs", queue_arguments={"x-dead-letter-exchange": "dlx", "x-dead-letter-routing-key": "dead"})
    with Consumer(channel, [queue], callbacks=[lambda body, message: message.reject()]):
        publish(channel, "bad", headers={"mine": 1}, priority=9)
        connection.drain_events(timeout=1)
    dead = channel.basic_get("dlq")
    assert dead.decode() == "bad"
    assert dead.headers["mine"] == 1
    assert dead.headers["x-death"][0]["reason"] == "rejected"
    assert dead.headers["x-death"][0]["queue"] == "jobs"
    assert dead.properties["priority"] == 9
    assert list(engine_of(connection).inspector().dead("jobs")) == []


def test_without_a_way_to_the_dead_letter_exchange_the_store_keeps_it(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    queue = Queue("jobs", queue_arguments={"x-dead-letter-exchange": "nowhere"})
    with Consumer(channel, [queue], callbacks=[lambda body, message: message.reject()]):
        publish(channel, "bad")
        connection.drain_events(timeout=1)
    assert [letter.message.body for letter in engine_of(connection).inspector().dead("jobs")] == [b'"bad"']


def test_the_delivery_limit_leads_to_the_dead_letter_exchange_too(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    queue = Queue("jobs", queue_arguments={
        "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dlq", "x-delivery-limit": 2})
    engine = engine_of(connection)
    with Consumer(channel, [queue], callbacks=[lambda body, message: message.requeue()]):
        publish(channel, "bad")
        dead = wait_until(lambda: not drained(connection) and channel.basic_get("dlq"), 5, "the dead letter")
    assert dead.decode() == "bad"
    assert dead.headers["x-death"][0]["reason"] == "delivery_limit"
    assert list(engine.inspector().dead("jobs")) == []


def test_several_consumers_of_one_queue_on_one_connection(broker: Broker) -> None:
    connection = broker.open()
    got: dict[int, list[Any]] = {0: [], 1: [], 2: []}

    def consume(number: int, channel: Any) -> Any:
        consumer = Consumer(channel, [Queue("jobs")], prefetch_count=2,
                            callbacks=[lambda body, message: (got[number].append(body), message.ack())])
        consumer.consume()
        return consumer

    first = connection.channel()
    consumers = [consume(0, first), consume(1, first), consume(2, connection.channel())]
    for number in range(12):
        publish(first, number)
    drain(connection, lambda: sum(map(len, got.values())) == 12)
    assert sorted(number for numbers in got.values() for number in numbers) == list(range(12))
    assert got[0]
    assert got[1]
    consumers[0].cancel()
    publish(first, 12)
    drain(connection, lambda: 12 in got[1] + got[2])


def test_cancel_gives_back_what_was_not_handed_over(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    for number in range(6):
        publish(channel, number)
    got: list[Any] = []

    def on_message(body: Any, message: Any) -> None:
        got.append(body)
        message.ack()
        consumer.cancel()

    consumer = Consumer(channel, [Queue("jobs")], callbacks=[on_message], prefetch_count=4)
    consumer.consume()
    connection.drain_events(timeout=1)
    assert got == [0]
    assert [channel.basic_get("jobs", no_ack=True).decode() for _ in range(5)] == [1, 2, 3, 4, 5]


def test_closing_a_channel_hands_back_in_order_uncounted(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    for number in range(4):
        publish(channel, number)
    Consumer(channel, [Queue("jobs")], callbacks=[lambda body, message: None]).consume()
    connection.drain_events(timeout=1)
    channel.close()
    other = connection.channel()
    again = [other.basic_get("jobs") for _ in range(4)]
    assert [message.decode() for message in again] == [0, 1, 2, 3]
    assert {message.headers["x-delivery-count"] for message in again} == {1}
    assert {message.delivery_info["redelivered"] for message in again} == {True}


def test_recover_and_flow(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    publish(channel)
    got: list[Any] = []
    consumer = Consumer(channel, [Queue("jobs")], callbacks=[lambda body, message: got.append(message)])
    consumer.flow(False)
    consumer.consume()
    with pytest.raises(socket.timeout):
        connection.drain_events(timeout=0.05)
    consumer.flow(True)
    drain(connection, lambda: got)
    consumer.recover(requeue=True)
    drain(connection, lambda: len(got) == 2)
    assert got[1].delivery_info["redelivered"] is True


def test_consumer_mixin(broker: Broker) -> None:
    connection = broker.open()
    publish(connection.channel(), 1)

    class Worker(ConsumerMixin):
        def __init__(self) -> None:
            self.connection = connection

        def get_consumers(self, consumer: Any, channel: Any) -> list[Any]:
            return [consumer([Queue("jobs")], callbacks=[self.on_message])]

        def on_message(self, body: Any, message: Any) -> None:
            message.ack()
            self.should_stop = True

    Worker().run()
    assert engine_of(connection).ready("jobs") == 0


# ------------------------------------------------------------ queues that come and go
def test_live_queue_gets_what_is_sent_after_its_binding(broker: Broker) -> None:
    connection, other = broker.open(), broker.second()
    exchange = Exchange("control", "fanout", durable=False)
    exchange(other.channel()).declare()
    Producer(other.channel(), exchange).publish("before")
    channel = connection.channel()
    queue = Queue("box", exchange, exclusive=True, durable=False)(channel)
    queue.declare()
    Producer(other.channel(), exchange).publish("after")
    got: list[Any] = []
    with Consumer(channel, [queue], callbacks=[lambda body, message: got.append(body)], no_ack=True):
        drain(connection, lambda: got)
        assert tuple(queue.queue_declare(passive=True)) == ("box", 0, 0)
    assert got == ["after"]
    assert engine_of(connection).inspector().queues() == []


def test_live_queues_of_topic_and_of_wildcard_fanout_filter(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    got: dict[str, list[Any]] = {"topic": [], "fanout": []}
    for kind, seen in got.items():
        exchange = Exchange(f"x.{kind}", kind)
        queue = Queue(f"q.{kind}", exchange, routing_key="worker.#", durable=False, auto_delete=True)
        Consumer(channel, [queue], callbacks=[lambda body, message, seen=seen: seen.append(body)],
                 no_ack=True).consume()
        for key in ("task.sent", "worker.online", "worker"):
            Producer(channel, exchange).publish(key, routing_key=key)
    drain(connection, lambda: sum(map(len, got.values())) == 4)
    assert got == {"topic": ["worker.online", "worker"], "fanout": ["worker.online", "worker"]}


def test_a_live_topic_queue_takes_exact_keys(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    exchange = Exchange("t", "topic")
    got: list[Any] = []
    Consumer(channel, [Queue("q", exchange, routing_key="a.b", exclusive=True)],
             callbacks=[lambda body, message: got.append(body)], no_ack=True).consume()
    for key in ("a", "b", "a.b.c", "a.b"):
        Producer(channel, exchange).publish(key, routing_key=key)
    drain(connection, lambda: got)
    assert got == ["a.b"]


def test_a_queue_can_be_live_and_stored(broker: Broker) -> None:
    """One queue of one connection, bound to a fanout and to a direct exchange."""
    connection, other = broker.open(), broker.second()
    channel = connection.channel()
    everyone, mine = Exchange("everyone", "fanout"), Exchange("mine", "direct")
    queue = Queue("q", [binding(everyone), binding(mine, routing_key="me")], exclusive=True)
    got: list[Any] = []
    consumer = Consumer(channel, [queue], callbacks=[lambda body, message: (got.append(body), message.ack())])
    Producer(other.channel(), everyone).publish("to all")
    Producer(other.channel(), mine).publish("to me", routing_key="me")
    with consumer:
        drain(connection, lambda: len(got) == 2)
    assert sorted(got) == ["to all", "to me"]
    assert engine_of(other).spec("q") is None


def test_live_messages_can_be_acknowledged_and_requeued(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    exchange = Exchange("f", "fanout")
    queue = Queue("q", exchange, exclusive=True)(channel)
    queue.declare()
    Producer(channel, exchange).publish("x")
    message = wait_until(lambda: channel.basic_get("q"), 5, "the message")
    message.requeue()
    again = channel.basic_get("q")
    assert again.delivery_info["redelivered"] is True
    again.ack()
    assert channel.basic_get("q") is None


def test_reply_queue_buffers_from_its_declaration_and_goes(broker: Broker) -> None:
    connection, other = broker.open(), broker.second()
    channel = connection.channel()
    exchange = Exchange("replies", "direct", durable=False)
    queue = Queue("reply", exchange, routing_key="k", durable=False, exclusive=True, expires=10)(channel)
    assert tuple(queue.queue_declare()) == ("reply", 0, 0)
    queue.declare()
    Producer(other.channel(), exchange).publish("early", routing_key="k")
    got: list[Any] = []
    with Consumer(channel, [queue], callbacks=[lambda body, message: got.append(body)], no_ack=True):
        drain(connection, lambda: got)
    assert engine_of(connection).spec("reply") is None
    assert list(channel.list_bindings()) == []
    Producer(other.channel(), exchange).publish("late", routing_key="k")
    assert engine_of(connection).inspector().queues() == []


def test_a_reply_to_a_queue_that_has_gone_makes_no_queue(broker: Broker) -> None:
    """An rpc client that died: its replies must not make a queue that stays."""
    connection, other = broker.open(), broker.second()
    channel = connection.channel()
    Queue("client", durable=False, auto_delete=True, expires=10)(channel).declare()
    publish(other.channel(), "answer", queue="client", correlation_id="1")
    assert engine_of(connection).ready("client") == 1
    engine_of(connection).delete("client")
    publish(other.channel(), "answer", queue="client", correlation_id="2")
    publish(broker.second().channel(), "answer", queue="client", correlation_id="3")
    assert engine_of(connection).spec("client") is None
    assert other.transport.shared.publisher.unroutable.count == 1


def test_auto_delete_goes_with_its_last_consumer_and_comes_back_with_the_next(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    queue = Queue("q", Exchange("e"), routing_key="q", auto_delete=True)
    first = Consumer(channel, [queue], callbacks=[lambda body, message: None])
    second = Consumer(connection.channel(), [queue], callbacks=[lambda body, message: None])
    first.consume()
    second.consume()
    first.cancel()
    assert engine_of(connection).spec("q") is not None
    second.cancel()
    assert engine_of(connection).spec("q") is None
    first.consume()
    publish(channel, queue="q")
    assert engine_of(connection).spec("q") is not None


def test_exclusive_queues_go_with_their_connection(broker: Broker) -> None:
    connection, other = broker.open(), broker.second()
    Queue("mine", exclusive=True)(connection.channel()).declare()
    assert engine_of(other).spec("mine") is not None
    connection.release()
    assert engine_of(other).spec("mine") is None


def test_broadcast_task_queues_are_stored_copies(broker: Broker) -> None:
    connection, other = broker.open(), broker.second()
    exchange = Exchange("everyone", "fanout")
    for owner, name in ((connection, "bcast.1"), (other, "bcast.2")):
        Queue(name, exchange, auto_delete=True)(owner.channel()).declare()
    Producer(connection.channel(), exchange).publish("do it", routing_key="everyone")
    assert [engine_of(connection).ready(name) for name in ("bcast.1", "bcast.2")] == [1, 1]
    message = connection.channel().basic_get("bcast.2")
    message.requeue()
    assert engine_of(connection).ready("bcast.2") == 1


def test_arguments_that_cannot_be_used_are_refused_and_unknown_ones_accepted(broker: Broker) -> None:
    connection = broker.open()
    with pytest.raises(connection.channel_errors) as refused:
        connection.channel().queue_declare("q", arguments={"x-expires": "soon"})
    assert refused.value.code == 406
    connection.channel().queue_declare("q", durable=True, arguments={"x-queue-type": "quorum", "x-max-priority": 10})
    assert tuple(connection.channel().queue_declare("q", passive=True)) == ("q", 0, 0)


# ------------------------------------------------------------ revoke
def test_a_revoked_task_that_waits_is_removed(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    eta = (datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()
    for task in ("a", "b", "c"):
        publish(channel, headers={"task": "t", "id": task, "eta": eta})
    control = Exchange("celery.pidbox", "fanout", durable=False)
    Producer(channel, control).publish({"method": "revoke", "arguments": {"task_id": ["a", "b"], "terminate": False}},
                                       serializer="json")
    Producer(channel, control).publish({"method": "ping", "arguments": {}}, serializer="json")
    assert [late.message.id for late in engine_of(connection).inspector().delayed("jobs")] == ["c"]


def test_revoking_can_leave_the_store_alone(broker: Broker) -> None:
    connection = broker.open(revoke_waiting=False)
    channel = connection.channel()
    eta = (datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()
    publish(channel, headers={"task": "t", "id": "a", "eta": eta})
    Producer(channel, Exchange("celery.pidbox", "fanout", durable=False)).publish(
        {"method": "revoke", "arguments": {"task_id": "a"}}, serializer="json")
    assert len(list(engine_of(connection).inspector().delayed("jobs"))) == 1
