"""Exchanges and bindings: shared by processes, made again when the store has lost them, never a silent loss."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from amqp.exceptions import ChannelError
from kombu import Exchange, Producer, Queue

from tests.kombu_rig import Broker, engine_of


def bodies(channel: Any, queue: str) -> list[Any]:
    got = []
    while message := channel.basic_get(queue, no_ack=True):
        got.append(message.decode())
    return got


@pytest.mark.parametrize(("key", "words", "wanted"), [
    ("a.*", ["a.b", "a", "a.b.c", "b.a"], ["a.b"]),
    ("a.#", ["a.b", "a", "a.b.c", "b.a"], ["a.b", "a", "a.b.c"]),
    ("#", ["", "a", "a.b"], ["", "a", "a.b"]),
    ("#.z", ["z", "a.z", "a.b.z", "z.a"], ["z", "a.z", "a.b.z"]),
    ("a.*.c", ["a.b.c", "a.c", "a.b.b.c"], ["a.b.c"]),
])
def test_topic(broker: Broker, key: str, words: list[str], wanted: list[str]) -> None:
    channel = broker.open().channel()
    exchange = Exchange("t", "topic")
    Queue("q", exchange, routing_key=key)(channel).declare()
    for word in words:
        Producer(channel, exchange).publish([word], routing_key=word)
    assert bodies(channel, "q") == [[word] for word in wanted]


def test_direct_goes_to_every_queue_of_the_key_once(broker: Broker) -> None:
    channel = broker.open().channel()
    exchange = Exchange("d", "direct")
    for name, key in (("one", "k"), ("two", "k"), ("three", "other")):
        Queue(name, exchange, routing_key=key)(channel).declare()
    Queue("one", exchange, routing_key="k")(channel).declare()
    Producer(channel, exchange).publish("x", routing_key="k")
    assert [bodies(channel, name) for name in ("one", "two", "three")] == [["x"], ["x"], []]


def test_fanout_reaches_stored_queues_and_filters_by_wildcards_only(broker: Broker) -> None:
    channel = broker.open().channel()
    exchange = Exchange("f", "fanout")
    for name, key in (("all", ""), ("keyed", "key"), ("filtered", "worker.#")):
        Queue(name, exchange, routing_key=key)(channel).declare()
    Producer(channel, exchange).publish("task", routing_key="task.sent")
    Producer(channel, exchange).publish("worker", routing_key="worker.online")
    assert [bodies(channel, name) for name in ("all", "keyed", "filtered")] == [
        ["task", "worker"], ["task", "worker"], ["worker"]]


def test_another_process_knows_types_and_bindings(broker: Broker) -> None:
    ours, theirs = broker.open().channel(), broker.second().channel()
    exchange = Exchange("t", "topic")
    Queue("q", exchange, routing_key="a.#")(ours).declare()
    theirs.basic_publish(theirs.prepare_message("x", content_type="text/plain", content_encoding="utf-8"),
                         exchange="t", routing_key="a.b")
    assert bodies(ours, "q") == ["x"]
    assert list(theirs.list_bindings()) == [("q", "t", "a.#")]
    theirs.queue_bind("other", "t", "a.*")
    Producer(ours, exchange).publish("y", routing_key="a.c")
    assert bodies(theirs, "other") == ["y"]


def test_a_reply_binding_is_seen_by_the_next_publish(broker: Broker) -> None:
    ours, theirs = broker.open().channel(), broker.second().channel()
    replies = Exchange("reply", "direct", durable=False)
    replies(theirs).declare()
    for number in range(3):
        name = f"q{number}"
        Queue(name, replies, routing_key=name, durable=False, exclusive=True, expires=10)(ours).declare()
        Producer(theirs, replies).publish(number, routing_key=name, serializer="json")
        assert bodies(ours, name) == [number]


def test_redeclaring_differently_is_refused(broker: Broker) -> None:
    connection, other = broker.open(), broker.second()
    Exchange("e", "direct")(connection.channel()).declare()
    Exchange("e", "direct")(other.channel()).declare()
    for exchange in (Exchange("e", "topic"), Exchange("e", "direct", durable=False)):
        with pytest.raises(ChannelError) as refused:
            exchange(other.channel()).declare()
        assert refused.value.code == 406
        assert isinstance(refused.value, connection.channel_errors)
    with pytest.raises(ChannelError, match="headers"):
        Exchange("h", "headers")(connection.channel()).declare()


def test_passive_declarations(broker: Broker) -> None:
    connection, other = broker.open(), broker.second()
    channel = connection.channel()
    with pytest.raises(connection.channel_errors) as missing:
        channel.exchange_declare("nowhere", passive=True)
    assert missing.value.code == 404
    with pytest.raises(connection.channel_errors) as missing:
        channel.queue_declare("nowhere", passive=True)
    assert missing.value.code == 404
    Queue("q", Exchange("e"), routing_key="q")(channel).declare()
    Producer(channel, Exchange("e")).publish("x", routing_key="q")
    other.channel().exchange_declare("e", passive=True)
    assert tuple(other.channel().queue_declare("q", passive=True)) == ("q", 1, 0)


def test_deleting_from_a_process_that_declared_nothing(broker: Broker) -> None:
    ours, theirs = broker.open().channel(), broker.second().channel()
    exchange = Exchange("e")
    Queue("q", exchange, routing_key="q")(ours).declare()
    Producer(ours, exchange).publish("x", routing_key="q")
    assert theirs.queue_delete("q", if_empty=True) == 0
    assert theirs.queue_purge("q") == 1
    Producer(ours, exchange).publish("x", routing_key="q")
    Producer(ours, exchange).publish("x", routing_key="q")
    assert theirs.queue_delete("q") == 2
    assert list(theirs.list_bindings()) == []
    theirs.exchange_delete("e")
    with pytest.raises(ChannelError):
        theirs.exchange_declare("e", passive=True)


def test_unbinding_and_exchanges_that_end_with_their_last_queue(broker: Broker) -> None:
    channel = broker.open().channel()
    exchange = Exchange("e", auto_delete=True)
    queue = Queue("q", exchange, routing_key="q")(channel)
    queue.declare()
    queue.unbind_from(exchange, "q")
    assert list(channel.list_bindings()) == []
    with pytest.raises(ChannelError):
        channel.exchange_declare("e", passive=True)


def test_unroutable_warns_once_and_is_counted(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    connection = broker.open()
    channel = connection.channel()
    with caplog.at_level(logging.WARNING, "streambroker"):
        for _ in range(3):
            Producer(channel, Exchange("empty")).publish("x", routing_key="k")
    told = [record for record in caplog.records if "empty" in record.getMessage()]
    assert len(told) == 1
    assert "no queue is bound" in told[0].getMessage()
    assert connection.transport.shared.publisher.unroutable.count == 3


def test_unroutable_returns_to_a_producer_that_asks(broker: Broker) -> None:
    returned: list[Any] = []

    def on_return(error: Any, exchange: str, key: str, message: Any) -> None:
        returned.append((error.reply_code, exchange, key))

    producer = Producer(broker.open().channel(), Exchange("empty"), on_return=on_return)
    producer.publish("x", routing_key="k")
    assert returned == []
    producer.publish("x", routing_key="k", mandatory=True)
    assert returned == [(312, "empty", "k")]


def test_unroutable_goes_to_the_queue_for_it(broker: Broker) -> None:
    channel = broker.open(deadletter_queue="lost").channel()
    Producer(channel, Exchange("empty")).publish("x", routing_key="k")
    assert bodies(channel, "lost") == ["x"]


def test_lost_routing_is_made_again_by_its_producer(broker: Broker) -> None:
    connection, other = broker.open(), broker.second()
    channel = connection.channel()
    exchange = Exchange("e", "topic")
    Queue("q", exchange, routing_key="a.*")(channel).declare()
    store = engine_of(connection)
    for table in ("exchanges", "bindings"):
        store.table(table).delete(list(store.table(table).rows()))
    store.delete("q")
    Producer(channel, exchange).publish("x", routing_key="a.b")
    assert bodies(channel, "q") == ["x"]
    other.channel().exchange_declare("e", passive=True)
    assert list(other.channel().list_bindings()) == [("q", "e", "a.*")]


def test_a_queue_that_was_deleted_here_is_not_made_again(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    exchange = Exchange("e")
    Queue("q", exchange, routing_key="q")(channel).declare()
    channel.queue_delete("q")
    Producer(channel, exchange).publish("x", routing_key="q")
    assert engine_of(connection).spec("q") is None
    assert connection.transport.shared.publisher.unroutable.count == 1


def test_foreign_rows_cost_nobody_anything(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    connection = broker.open()
    channel = connection.channel()
    exchange = Exchange("e")
    Queue("q", exchange, routing_key="q")(channel).declare()
    engine_of(connection).table("bindings").put("not json", "?")
    engine_of(connection).table("exchanges").put("broken", "{}")
    Producer(channel, exchange).publish("x", routing_key="q")
    channel.exchange_declare("broken", "direct", durable=True)
    assert bodies(channel, "q") == ["x"]
    assert "none of ours" in caplog.text
