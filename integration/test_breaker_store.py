"""A store that refuses, or holds what is none of ours: it costs what is concerned and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streambroker import connect
from streambroker.errors import StoreUnavailable
from streambroker.message import Message
from streambroker.testing.conformance.kit import bodies, drain, messages
from streambroker.testing.servers import RedisServer


@pytest.mark.parametrize("fault", ["maxmemory", "replica", "min-replicas-to-write"])
def test_a_refusal_inside_a_script_is_told_from_an_error(
        every_kind: str, fresh: Callable[..., RedisServer], fault: str) -> None:
    server = fresh(kind=every_kind, aof=False)
    engine = connect(server.url(), publish_timeout=0)
    engine.publish("q", messages("a"))
    with server.client() as client:
        if fault == "replica":
            client.replicaof(server.host, "1")
        else:
            client.config_set(fault, 1)
        with pytest.raises(StoreUnavailable):
            engine.publish("q", messages("b"))
        if fault == "replica":
            client.replicaof("NO", "ONE")
        else:
            client.config_set(fault, 0)
        engine.publish("q", messages("b"))
        assert client.xlen("sb:{q}:s:0") == 2
    engine.close()


def test_due_messages_do_not_wait_for_memory(every_kind: str, fresh: Callable[..., RedisServer]) -> None:
    server = fresh(kind=every_kind, aof=False)
    engine = connect(server.url())
    consumer = engine.consume(["q"])
    with server.client() as client:
        engine.publish("q", [Message(b"delayed", delay=0.2), Message(b"ready")])
        client.config_set("maxmemory", 1)
        got = drain(consumer, 2)
        assert sorted(bodies(got)) == ["delayed", "ready"]
        for delivery in got:
            consumer.ack(delivery)
        consumer.receive(0, 0)
    engine.close()


@pytest.mark.parametrize("key", ["s:0", "s:1", "bell", "delay", "back", "trial"])
def test_a_key_of_another_type_costs_its_own_queue_alone(server: RedisServer, prefix: str, key: str) -> None:
    engine = connect(server.url(), prefix=prefix)
    with server.client() as client:
        client.sadd(f"{prefix}:{{bad}}:{key}", "x")
    consumer = engine.consume(["bad", "good"])
    for number in range(6):
        engine.publish("good", messages(str(number)))
        got = drain(consumer, 1, 2.0)
        assert bodies(got) == [str(number)]
        consumer.ack(got[0])
    engine.close()
    with server.client() as client:
        assert not client.exists(f"{prefix}:{{@}}:workers"), "the engine said goodbye"


def test_a_due_message_stays_where_it_is_while_its_stream_is_none(server: RedisServer, prefix: str) -> None:
    engine = connect(server.url(), prefix=prefix)
    stream = f"{prefix}:{{q}}:s:0"
    with server.client() as client:
        client.set(stream, "x")
        engine.publish("q", [Message(b"a", delay=0.05)])
        consumer = engine.consume(["q"])
        assert drain(consumer, 1, 0.4) == []
        client.delete(stream)
        assert bodies(drain(consumer, 1)) == ["a"]
    engine.close()
