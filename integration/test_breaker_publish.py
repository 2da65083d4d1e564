"""Replies of publishes that get lost: repeated by Kombu on a new connection, and never two messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Connection, Exchange, Producer, Queue

from integration.stores import Server, mark, mark_of_broadcasts
from streambroker import connect
from streambroker.testing.faults import Proxy

RETRY: dict[str, Any] = {"retry": True, "retry_policy": {"max_retries": 5, "interval_start": 0.05}}


@pytest.fixture
def connection(server: Server, proxy: Proxy, prefix: str) -> Iterator[Connection]:
    """The only connection of this process to that store, so that Kombu's repeat comes with a new engine."""
    with Connection(server.url(port=proxy.port),
                    transport_options={"global_keyprefix": prefix, "publish_timeout": 0}) as connection:
        yield connection


def bound(connection: Connection, exchange: Exchange, key: str, *queues: str) -> Producer:
    channel = connection.channel()
    for queue in queues:
        Queue(queue, exchange, routing_key=key)(channel).declare()
    return Producer(channel, exchange)


def stored(server: Server, prefix: str, queue: str) -> int:
    engine = connect(server.url(), prefix=prefix)
    try:
        return engine.ready(queue)
    finally:
        engine.close()


def test_a_repeat_on_a_new_connection_stores_one(
        server: Server, proxy: Proxy, prefix: str, connection: Connection) -> None:
    producer = Producer(connection.channel())
    producer.publish({"n": 0}, routing_key="q")
    proxy.drop_reply(mark(server, prefix, "q"))
    producer.publish({"n": 1}, routing_key="q", **RETRY)
    proxy.wait_dropped()
    assert stored(server, prefix, "q") == 2


def test_a_repeat_to_several_queues_stores_one_in_each(
        server: Server, proxy: Proxy, prefix: str, connection: Connection) -> None:
    producer = bound(connection, Exchange("ex", "direct"), "k", "first", "second")
    producer.publish({"n": 0}, routing_key="k")
    proxy.drop_reply(mark(server, prefix, "second"))
    producer.publish({"n": 1}, routing_key="k", **RETRY)
    proxy.wait_dropped()
    assert [stored(server, prefix, queue) for queue in ("first", "second")] == [2, 2]
    producer.publish({"n": 1}, routing_key="k")
    assert [stored(server, prefix, queue) for queue in ("first", "second")] == [3, 3]


def test_a_repeat_after_a_lost_broadcast_stores_one(
        server: Server, proxy: Proxy, prefix: str, connection: Connection) -> None:
    producer = bound(connection, Exchange("ex", "topic"), "k.#", "q")
    proxy.drop_reply(mark_of_broadcasts(server, prefix))
    producer.publish({"n": 1}, routing_key="k.1", **RETRY)
    proxy.wait_dropped()
    assert stored(server, prefix, "q") == 1


def test_what_a_sender_may_put_into_headers(server: Server, prefix: str) -> None:
    engine = connect(server.url(), prefix=prefix)
    with Connection(server.url(), transport_options={"global_keyprefix": prefix}) as connection:
        producer = Producer(connection.channel())
        producer.publish(1, routing_key="q", headers={"id": 5})
        producer.publish(2, routing_key="q", correlation_id=7)
        producer.publish(3, routing_key="q", priority=[1])
        producer.publish(4, routing_key="q", priority=float("inf"))
    consumer = engine.consume(["q"])
    got = consumer.receive(5, 4)
    assert [each.message.id for each in got] == ["5", "7", "", ""]
    engine.close()
