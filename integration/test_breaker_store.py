"""A store that refuses, or holds what is none of ours: it costs what is concerned and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kombu import Connection, Exchange, Producer, Queue

from streambroker import connect
from streambroker.errors import StoreUnavailable
from streambroker.message import Message
from streambroker.testing.conformance.kit import bodies, drain, messages
from streambroker.testing.conformance.mortal import ProcessMortal
from streambroker.testing.servers import RedisServer, wait_until

pytestmark = pytest.mark.only_on("redis", "is about what a Redis keeps; foreign entries of a nats-server: "
                                          "test_jetstream_parts")


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


def test_acks_that_a_demoted_server_refuses_together_are_all_repeated(fresh: Callable[..., RedisServer]) -> None:
    """Several answers arrive at once, and the first of them ends the link."""
    server, queues = fresh(aof=False), list("abcd")
    engine = connect(server.url())
    for queue in queues:
        engine.publish(queue, messages("one"))
    consumer = engine.consume(queues)
    got = drain(consumer, 4)
    with server.client() as client:
        client.replicaof(server.host, "1")
        for delivery in got:
            consumer.ack(delivery)
        consumer.receive(0, 0)
        wait_until(lambda: consumer.receive(0, 0) or client.info("errorstats").get(
            "errorstat_READONLY", {"count": 0})["count"] >= 4, 5, "four refusals")
        client.replicaof("NO", "ONE")
    wait_until(lambda: consumer.receive(0, 0) or not any(engine.inspector().stats(queue).in_flight for queue in queues),
               5, "all acks are in force")
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


def test_foreign_entries_become_dead_letters_and_delay_nobody(
        every_kind: str, fresh: Callable[..., RedisServer], caplog: pytest.LogCaptureFixture) -> None:
    server = fresh(kind=every_kind, aof=False)
    engine = connect(server.url())
    stream, delay = "sb:{q}:s:0", "sb:{q}:delay"
    engine.publish("q", messages("first"))
    with server.client() as client:
        client.xadd(stream, {f"field{number}": "v" for number in range(10_000)})
        for fields in ({"x": "y"}, {"m": ""}, {"m": "99999999999999999999:"}, {b"\xff": b"\xfe"}, {"~a": "b"}):
            client.xadd(stream, fields)
        client.xadd(stream, {"m": "2:{}odd", "x": "garbage", "c": "3.5e300", "f": "q"})
        client.zadd(delay, {b"": 1, b"\xff\n\xfe": 1, b"x\nabc\n1\n1\n0\n2:{}odd too": 1, b"y" * 1_000_000: 1})
        engine.publish("q", messages("last"))
        consumer = engine.consume(["q"])
        got = drain(consumer, 4)
        assert sorted(bodies(got)) == ["first", "last", "odd", "odd too"]
        for delivery in got:
            consumer.ack(delivery)
        wait_until(lambda: engine.inspector().stats("q").in_flight == 0, 5, "all are settled")
        dead = list(engine.inspector().dead("q"))
        assert len(dead) == 9
        assert sum("no messages" in line for line in caplog.messages) == 1
        assert engine.inspector().replay("q", [letter.id for letter in dead]) == 9
        assert client.xlen(stream) == 9
    engine.close()


def test_rows_that_are_none_of_ours_stop_nobody(server: RedisServer, prefix: str) -> None:
    common = f"{prefix}:{{@}}:"
    mortal = ProcessMortal(server.url(), {"prefix": prefix, "visibility_timeout": 1})
    engine = connect(server.url(), prefix=prefix, visibility_timeout=1)
    engine.publish("b", messages("mine", "other"))
    assert len(mortal.take("b", 1)) == 1
    with server.client() as client:
        client.hset(common + "workers", mapping={
            b"\xff\xfe": b"garbage", "x": "[]", "y": '{"queues":5}', "z": '{"queues":["b"],"lease":"abc"}'})
        client.hset(common + "t:queues", mapping={
            "a": "garbage", "b": "[]", b"\xff": "{}", "c": '{"delivery_limit":"abc","message_ttl":"x"}',
            "d": '{"durable": false}', "e": "5", "f": '{"message_ttl": NaN, "arguments": 5}'})
        client.set(common + "v:queues", "1")
    for queue in "acdef":
        engine.publish(queue, messages("m"))
    consumer = engine.consume([*"abcdef"])
    assert sorted(bodies(drain(consumer, 6))) == [*"mmmmm", "other"]
    assert len(engine.inspector().workers()) == 2
    assert {*"abcdef"} <= {*engine.inspector().queues()}
    assert [engine.inspector().stats(queue).in_flight for queue in "abcdef"] == [1, 2, 1, 1, 1, 1]
    mortal.die()
    assert bodies(drain(consumer, 1)) == ["mine"]
    engine.close()


def test_routing_rows_that_are_none_of_ours_stop_nobody(server: RedisServer, prefix: str) -> None:
    with Connection(server.url(), transport_options={"global_keyprefix": prefix}) as connection:
        exchange = Exchange("ex", "topic")
        channel = connection.channel()
        Queue("q", exchange, routing_key="k.#")(channel).declare()
        with server.client() as client:
            client.hset(f"{prefix}:{{@}}:t:bindings", mapping=dict.fromkeys(
                ["5", "null", "[]", '["ex", "q", 5]', '["ex", ["q"], "k"]', "[" * 100_000, "garbage"], "durable"))
            client.set(f"{prefix}:{{@}}:v:bindings", "1")
        Producer(channel, exchange).publish(1, routing_key="k.1")
        assert channel.queue_declare("q", passive=True).message_count == 1
        assert list(channel.list_bindings()) == [("q", "ex", "k.#")]


def test_what_an_operator_trimmed_is_forgotten_and_what_is_left_recovered(every_server: RedisServer,
                                                                          prefix: str) -> None:
    """Rows 78, 79: entries that a dead worker holds and that are gone from the stream."""
    options = {"prefix": prefix, "visibility_timeout": 2}
    mortal, engine = ProcessMortal(every_server.url(), options), connect(every_server.url(), **options)
    engine.publish("q", messages(*(f"{number}" for number in range(50))))
    assert len(mortal.take("q", 50)) == 50
    with every_server.client() as client:
        for entry, _ in client.xrange(f"{prefix}:{{q}}:s:0")[:40]:
            client.xdel(f"{prefix}:{{q}}:s:0", entry)
    mortal.die()
    consumer = engine.consume(["q"])
    got = drain(consumer, 10, 10)
    assert bodies(got) == [f"{number}" for number in range(40, 50)]
    for delivery in got:
        consumer.ack(delivery)
    engine.publish("q", messages("next"))
    assert bodies(drain(consumer, 1)) == ["next"]
    wait_until(lambda: engine.inspector().stats("q").in_flight == 1, 10, "nothing else is pending")
    engine.close()


def test_a_group_of_others_keeps_no_entry(server: RedisServer, prefix: str) -> None:
    """Row 81: nobody reads for it, and nothing waits for that."""
    engine = connect(server.url(), prefix=prefix)
    engine.publish("q", messages(*"abc"))
    with server.client() as client:
        client.xgroup_create(f"{prefix}:{{q}}:s:0", "foreign", "0")
        consumer = engine.consume(["q"])
        for delivery in drain(consumer, 3):
            consumer.ack(delivery)
        wait_until(lambda: client.xlen(f"{prefix}:{{q}}:s:0") == 0, 5, "all are gone")
    engine.close()
