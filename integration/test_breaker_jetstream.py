"""What may not happen on JetStream whatever fails: two workers with one message, a message that nobody gets, a process
that hangs."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from streambroker.engines.jetstream.engine import JetStreamEngine
from streambroker.errors import StoreConnectionError
from streambroker.message import Message
from streambroker.testing.conformance.kit import bodies, drain, messages, until
from streambroker.testing.conformance.mortal import ProcessMortal
from streambroker.testing.faults import Proxy
from streambroker.testing.natsserver import NatsServer

connect = JetStreamEngine.from_url


@pytest.fixture
def nats(nats_servers: Callable[[str], NatsServer]) -> NatsServer:
    return nats_servers("nats")


@pytest.fixture
def proxy(nats: NatsServer) -> Iterator[Proxy]:
    with Proxy(nats.port) as proxy:
        yield proxy


@pytest.fixture
def own() -> Iterator[NatsServer]:
    """A server for this test alone."""
    with NatsServer(max_payload=8 << 20) as server:
        yield server


def put(server: NatsServer, subject: str, data: bytes, headers: bytes = b"") -> None:
    """As somebody else's program does."""
    block = b"NATS/1.0\r\n" + headers + b"\r\n\r\n"
    with socket.create_connection((server.host, server.port)) as link, link.makefile("rb") as lines:
        link.sendall(b'CONNECT {"verbose":false,"headers":true}\r\nHPUB %s %d %d\r\n%s%s\r\nPING\r\n' % (
            subject.encode(), len(block), len(block) + len(data), block, data))
        while lines.readline() != b"PONG\r\n":
            pass


def test_what_is_given_back_is_not_taken_from_the_next_worker(nats: NatsServer, proxy: Proxy, prefix: str) -> None:
    """The answer is lost, the link comes back: saying it again would hit the next one."""
    first, second, third = (connect(nats.url(port=port), prefix=prefix) for port in (proxy.port, 0, 0))
    second.publish("q", messages("a"))
    giving = first.consume(["q"])
    held = drain(giving, 1)
    waiting = second.consume(["q"])
    assert waiting.receive(0.2) == []
    proxy.drop_reply(b"-NAK")
    giving.hand_back(held)
    got = drain(waiting, 1)
    assert bodies(got) == ["a"]
    until(lambda: first.link.epoch > 1)
    assert third.consume(["q"]).receive(2) == []
    assert not got[0].lost
    for engine in (first, second, third):
        engine.close()


def test_what_is_given_back_too_late_is_not_taken_from_the_next_worker(
        nats: NatsServer, proxy: Proxy, prefix: str) -> None:
    first, second, third = (connect(nats.url(port=port), prefix=prefix, visibility_timeout=2)
                            for port in (proxy.port, 0, 0))
    second.publish("q", messages("a"))
    giving = first.consume(["q"])
    held = drain(giving, 1)
    waiting = second.consume(["q"])
    proxy.hold("down")
    giving.hand_back(held)
    got = drain(waiting, 1, 8)
    assert bodies(got) == ["a"]
    proxy.release()
    assert third.consume(["q"]).receive(2) == []
    assert not got[0].lost
    for engine in (first, second, third):
        engine.close()


def test_what_lay_in_the_buffers_of_a_stopped_worker_is_not_run_there(nats: NatsServer, prefix: str) -> None:
    mortal = ProcessMortal(nats.url(), {"prefix": prefix, "visibility_timeout": 2})
    engine = connect(nats.url(), prefix=prefix, visibility_timeout=2)
    engine.publish("q", messages("before"))
    assert len(mortal.take("q", 5)) == 1  # and it waits for four more
    mortal.stop()
    engine.publish("q", messages("a", "b"))
    assert sorted(bodies(drain(engine.consume(["q"]), 3, 8))) == ["a", "b", "before"]
    mortal.resume()
    assert mortal.take("q", 5, 1) == []
    mortal.die()
    engine.close()


def test_a_link_that_dies_unseen_costs_no_lease(nats: NatsServer, proxy: Proxy, prefix: str) -> None:
    engine, other = (connect(nats.url(port=port), prefix=prefix, visibility_timeout=9) for port in (proxy.port, 0))
    other.publish("q", messages("a"))
    held = drain(engine.consume(["q"]), 1)
    waiting = other.consume(["q"])
    assert waiting.receive(2.9) == []  # the lease is about to be renewed
    proxy.freeze()
    assert waiting.receive(11) == []
    assert not held[0].lost
    engine.close()
    other.close()


@pytest.mark.parametrize(("count", "length"), [(5000, 150), pytest.param(12000, 1, marks=pytest.mark.long)])
def test_a_process_that_holds_very_much_goes_on(own: NatsServer, count: int, length: int) -> None:
    queue = "q" * length
    engine = connect(own.url(), confirm="deferred")
    for start in range(0, count, 500):
        engine.publish(queue, [Message(b"%d" % number) for number in range(start, start + 500)])
    engine.flush()
    engine.link._connection.max_payload = 1 << 20  # that of a stock server
    consumer = engine.consume([queue])
    held = drain(consumer, count, 60)
    assert len(held) == count
    until(lambda: any(delivery.place.recorded for delivery in held), 10)
    waiting = engine.consume([queue])
    consumer.hand_back(held[-1:])
    assert len(drain(waiting, 1)) == 1
    until(lambda: len(engine.inspector().in_flight(queue, count)) == count)
    engine.settles._waiting.clear()
    engine.close(keep=held)


def test_deleted_books_are_made_again(nats: NatsServer, prefix: str) -> None:
    engine = connect(nats.url(), prefix=prefix)
    engine.publish("q", messages("a"))
    consumer = engine.consume(["q"])
    held = drain(consumer, 1)
    nats.api(f"STREAM.DELETE.{prefix}_state")
    consumer.hand_back(held)
    again, = drain(consumer, 1)
    assert again.count == 1
    engine.close()


def test_a_priority_is_found_though_the_table_of_them_is_lost(nats: NatsServer, prefix: str) -> None:
    producer, worker = connect(nats.url(), prefix=prefix), connect(nats.url(), prefix=prefix)
    producer.publish("q", messages("a", priority=2))
    nats.api(f"STREAM.DELETE.{prefix}_state")
    assert bodies(drain(worker.consume(["q"]), 1)) == ["a"]
    producer.close()
    worker.close()


def test_a_priority_is_found_though_nobody_tells_of_it(nats: NatsServer, prefix: str) -> None:
    """The producer is killed between writing it down and telling it."""
    producer, worker = connect(nats.url(), prefix=prefix), connect(nats.url(), prefix=prefix)
    consumer = worker.consume(["q"])
    assert consumer.receive(1) == []
    producer.table("steps").put("2:q", "")
    producer.publish("q", messages("a", priority=2))
    assert bodies(drain(consumer, 1, 15)) == ["a"]
    producer.close()
    worker.close()


def test_consuming_that_failed_leaves_nothing(own: NatsServer) -> None:
    engine = connect(own.url(), publish_timeout=1, socket_timeout=1, socket_connect_timeout=1)
    engine.publish("q", messages("a"))
    own.freeze()
    with pytest.raises(StoreConnectionError):
        engine.consume(["q"])
    own.thaw()
    consumer = engine.consume(["q"])
    assert len(drain(consumer, 1, 15)) == 1
    consumer.close()
    until(lambda: engine.inspector().workers() == [])
    assert engine.consumption.consumers() == []
    assert engine.consumption.queues() == []
    engine.close()


@pytest.mark.parametrize(("fault", "most"), [("frozen", 9), ("gone", 4)])
def test_closing_ends_within_seconds_though_the_store_is(own: NatsServer, fault: str, most: float) -> None:
    engine = connect(own.url())
    queues = [f"q{number}" for number in range(5)]
    for queue in queues:
        engine.publish(queue, [Message(b"a", priority=step) for step in range(4)])
    consumer = engine.consume(queues)
    assert len(drain(consumer, 20)) == 20
    assert consumer.receive(0.2, 5) == []
    own.freeze() if fault == "frozen" else own.kill()
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < most
    own.thaw() if fault == "frozen" else None


@pytest.mark.parametrize("end", ["dead", "tmp", "state", "late", "held", "q_q"])
def test_a_prefix_may_be_called_as_a_stream_of_another_one(nats: NatsServer, prefix: str, end: str) -> None:
    options = {"stream_per_queue": end == "q_q", "publish_timeout": 2}
    engines = [connect(nats.url(), prefix=name, **options) for name in (prefix, f"{prefix}_{end}")]
    for engine in engines:
        consumer = engine.consume(["q"])
        engine.publish("q", messages("a"))
        held, = drain(consumer, 1)
        consumer.dead_letter(held, "no")
    for engine in engines:
        until(lambda: len(list(engine.inspector().dead("q"))) == 1)  # noqa: B023  called at once
        engine.close()


def test_a_publish_is_not_repeated_when_the_server_has_forgotten_it(
        nats: NatsServer, proxy: Proxy, prefix: str) -> None:
    engine = connect(nats.url(port=proxy.port), prefix=prefix, duplicate_window=1, publish_timeout=8)
    engine.publish("q", messages("a"))
    proxy.hold("down")
    threading.Timer(3, proxy.release).start()
    with pytest.raises(StoreConnectionError):
        engine.publish("q", messages("b"))
    until(lambda: engine.link.connected and engine.ready("q") == 2, 10)
    engine.close()


def test_a_purge_leaves_no_books(nats: NatsServer, prefix: str) -> None:
    engine = connect(nats.url(), prefix=prefix)
    engine.publish("q", messages("a", "b"))
    consumer = engine.consume(["q"])
    consumer.hand_back(drain(consumer, 2))
    consumer.close()
    assert engine.inspector().purge("q") == 2
    engine.close()
    info = nats.api(f"STREAM.INFO.{prefix}_state", {"subjects_filter": f"{prefix}.b.>"})
    assert not info["state"].get("subjects")


_RECORDS = (
    b"", b"junk", b"[]", b'{"lease":"abc"}', b'{"lease":null,"held":5}', b'{"lease":30,"held":[[1]]}',
    b'{"lease":1e999}',
    b'{"gone":1,"lease":"z"}', b'{"lease":NaN,"age":0,"held":[["q","s t","d >",[[1,1,1]]]]}',
    b'{"holder":"h","host":"h","pid":1,"queues":["q"],"lease":30,"age":0,"held":[["q","a b","c>",[[1,0,1]]]]}')


def test_records_of_others_keep_nobody_from_taking_over(
        nats: NatsServer, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    mortal = ProcessMortal(nats.url(), {"prefix": prefix})
    engine = connect(nats.url(), prefix=prefix)
    engine.publish("q", messages("a"))
    assert len(mortal.take("q", 1)) == 1
    for number, record in enumerate(_RECORDS):
        put(nats, f"{prefix}.w.a{number}", record)
        put(nats, f"{prefix}.w.z{number}", record)
    put(nats, f"{prefix}.w.=41", b"{}")
    for news in (b"5", b"null", b"[]", b'{"steps":5}', b"\xff"):
        put(nats, f"{prefix}.n", news)
    consumer = engine.consume(["q"])
    assert consumer.receive(0.2) == []
    mortal.die()
    assert bodies(drain(consumer, 1, 12)) == ["a"]
    engine.inspector().workers()
    engine.close()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_delayed_messages_of_others_are_brought_to_queues_only(
        nats: NatsServer, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = connect(nats.url(), prefix=prefix)
    consumer = engine.consume(["q"])
    engine.publish("q", messages("first", delay=0.3))
    assert bodies(drain(consumer, 1)) == ["first"]
    heard: list[object] = []
    engine.link.listen("elsewhere.>", heard.append)
    for number, headers in enumerate((
            b"Target: elsewhere.x", b"Target: a b", b"Target: %s.q.*.0" % prefix.encode(), b"Other: 1")):
        put(nats, f"{prefix}.l.q.{77 * number}.job.{number}", b"foreign", headers)
    engine.publish("q", messages("later", delay=0.5))
    assert bodies(drain(consumer, 1)) == ["later"]
    until(lambda: nats.api(f"STREAM.INFO.{prefix}_late")["state"]["messages"] == 0)
    until(lambda: len(list(engine.inspector().dead("q"))) == 4)
    assert not heard
    engine.close()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_who_may_not_show_that_it_lives_does_not_begin(prefix: str) -> None:
    """Others would take it for dead."""
    config = (f'authorization {{ users: [{{user: u, password: p, permissions: {{publish: ">", subscribe: '
              f'{{deny: ["{prefix}.p.>"]}}}}}}] }}')
    with NatsServer(config=config) as server:
        engine = connect(server.url(user="u", password="p"), prefix=prefix)
        engine.publish("q", messages("a"))
        with pytest.raises(Exception, match="may not subscribe"):
            engine.consume(["q"])
        engine.close()


def test_acknowledgements_of_a_deleted_stream_do_not_hit_the_next_one(own: NatsServer) -> None:
    first, second = connect(own.url()), connect(own.url())
    first.publish("q", messages("a", "b"))
    consumer = first.consume(["q"])
    old = drain(consumer, 2)
    own.api("STREAM.DELETE.sb")
    second.publish("q", messages("c", "d"))
    new = drain(second.consume(["q"]), 1) + drain(consumer, 1)
    assert sorted(bodies(new)) == ["c", "d"]
    for delivery in old:
        consumer.ack(delivery)
    consumer.receive(0.2, 0)
    assert own.api("STREAM.INFO.sb")["state"]["messages"] == 2
    first.close()
    second.close()


@pytest.mark.parametrize("hard", [True, False])
def test_a_restart_takes_nothing_from_who_works_on_it(own: NatsServer, hard: bool) -> None:
    """A server that is killed forgets whom it gave what a moment ago."""
    engine = connect(own.url(), visibility_timeout=5)
    engine.publish("q", messages(*"abcdefgh"))
    consumer = engine.consume(["q"])
    held = drain(consumer, 8)
    own.restart(hard=hard)
    assert consumer.receive(7, 8) == []
    for delivery in held:
        consumer.ack(delivery)
    until(lambda: own.api("STREAM.INFO.sb")["state"]["messages"] == 0)
    engine.close()


def test_a_clean_stop_gives_back_all_of_thousands(own: NatsServer) -> None:
    engine, other = connect(own.url()), connect(own.url())
    engine.publish("q", messages(*map(str, range(6000))))
    consumer = engine.consume(["q"])
    assert len(drain(consumer, 6000, 20)) == 6000
    engine.close()
    got = drain(other.consume(["q"]), 6000, 20)
    assert bodies(got) == [str(number) for number in range(6000)]
    assert {each.count for each in got} == {1}
    other.close()


def test_a_full_server_is_emptied_by_new_workers() -> None:
    server = NatsServer()
    server._lines = [line.replace("sync_interval", "max_file: 20MB, sync_interval") for line in server._lines]
    server.configure("")
    with server:
        producer = connect(server.url(), publish_timeout=0.5)
        with pytest.raises(StoreConnectionError):
            for _ in range(40):
                producer.publish("q", [Message(b"x" * 700_000)])
        worker = connect(server.url())
        consumer = worker.consume(["q"])
        for delivery in drain(consumer, 10):
            consumer.ack(delivery)
        consumer.receive(0, 0)
        until(lambda: producer.publish("q", messages("a")) != [])
        worker.close()
        producer.close()
