"""Links that hang, die unseen or are torn in the middle of a command."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from integration.ledger import Ledger
from integration.rig import CeleryRig
from integration.stores import Server
from streambroker import connect
from streambroker.engine import Engine
from streambroker.engines.redis_streams.link import Link
from streambroker.errors import StoreConnectionError
from streambroker.message import Message
from streambroker.testing.conformance.kit import bodies, drain, messages
from streambroker.testing.conformance.mortal import ProcessMortal
from streambroker.testing.faults import Proxy
from streambroker.testing.servers import RedisServer, wait_until

#: what is the same on a nats-server is in test_jetstream_plain and test_jetstream_link
REDIS = pytest.mark.only_on("redis", "is about the connections to a Redis")
ROOT = Path(__file__).resolve().parent.parent


class PartialProxy(Proxy):
    """Some of its connections hang."""

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self._kept: set[Any] | None = None

    def hang_newcomers(self) -> None:
        with self._changed:
            self._kept = set(self._links)

    def freeze_one(self, port: int) -> None:
        """The connection that comes from this port of the client."""
        with self._changed:
            for link in self._links:
                if link.sockets["up"].getpeername()[1] == port:
                    link.frozen = True
                    return
        raise AssertionError(f"no connection from port {port}")

    def _pass_gate(self, link: Any, way: str) -> None:
        if self._kept is not None and link not in self._kept:
            link.frozen = True
        super()._pass_gate(link, way)


@pytest.fixture
def partial(server: RedisServer) -> Iterator[PartialProxy]:
    proxy = PartialProxy(server.port)
    yield proxy
    proxy.close()


def holders(engine: Engine, queue: str) -> dict[str, int]:
    """Who holds how many, of holders that are known as workers."""
    known = {worker.holder for worker in engine.inspector().workers()}
    found: dict[str, int] = {}
    for row in engine.inspector().in_flight(queue):
        if row.holder in known:
            found[row.holder] = found.get(row.holder, 0) + 1
    return found


@pytest.mark.parametrize("fault", ["frozen", "gone"])
def test_closing_ends_within_seconds_though_the_store_is(fresh: Callable[..., Server], fault: str) -> None:
    server = fresh(aof=False)
    engine = connect(server.url())
    queues = [f"q{number}" for number in range(5)]
    for queue in queues:
        engine.publish(queue, messages("a", "b"))
    consumer = engine.consume(queues)
    assert len(drain(consumer, 5)) == 5
    server.freeze() if fault == "frozen" else server.kill()
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < (9 if fault == "frozen" else 4)
    server.thaw() if fault == "frozen" else None


def test_threads_that_publish_do_not_queue_up_behind_a_dead_store(fresh: Callable[..., Server]) -> None:
    server = fresh(aof=False)
    engine = connect(server.url(), publish_timeout=1)
    engine.publish("q", messages("a"))
    server.kill()

    def publish(number: int) -> float:
        began = time.monotonic()
        with pytest.raises(StoreConnectionError):
            engine.publish("q", messages(str(number)))
        return time.monotonic() - began

    with ThreadPoolExecutor(6) as pool:
        assert max(pool.map(publish, range(6))) < 3
    engine.close()


class TimeLimit(Exception):
    pass


@REDIS
def test_a_publish_that_a_time_limit_cuts_does_not_mix_with_the_next(
        every_kind: str, fresh: Callable[..., RedisServer]) -> None:
    """As Celery's soft time limit in a task, or `gevent.Timeout`."""
    server = fresh(kind=every_kind, aof=False)
    engine = connect(server.url(), publish_timeout=1)
    engine.publish("q", messages("before"))

    def over(number: int, frame: object) -> None:
        raise TimeLimit

    previous = signal.signal(signal.SIGALRM, over)
    server.freeze()
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(TimeLimit):
            engine.publish("q", [Message(b"B" * 8_000_000)])
    finally:
        server.thaw()
        signal.signal(signal.SIGALRM, previous)
    engine.publish("q", [Message(b"C" * 10_000_000)])
    with server.client() as client:
        found = [set(fields[b"m"][4:]) for _, fields in client.xrange("sb:{q}:s:0")[1:]]
    assert found in ([{ord("B")}, {ord("C")}], [{ord("C")}])
    engine.close()


@REDIS
def test_a_large_command_to_a_store_that_is_frozen_costs_the_time_given_and_no_more(
        fresh: Callable[..., RedisServer]) -> None:
    server = fresh(aof=False)
    link = Link(lambda timeout: redis.Connection(port=server.port, socket_timeout=timeout), 1.5)
    link.open()
    words = ("SET", "x", b"a" * 20_000_000)
    server.freeze()
    try:
        start = time.monotonic()
        with pytest.raises(StoreConnectionError, match="not all was taken"):
            link.call(*words)
        assert 1.3 < time.monotonic() - start < 2.5
    finally:
        server.thaw()


@REDIS
def test_a_new_connection_that_hangs_costs_no_lease(
        server: RedisServer, partial: PartialProxy, prefix: str) -> None:
    engine = connect(server.url(port=partial.port), prefix=prefix, visibility_timeout=2)
    other = connect(server.url(), prefix=prefix, visibility_timeout=2)
    engine.publish("q", messages("long"))
    consumer = engine.consume(["q"])
    assert len(drain(consumer, 1)) == 1
    waiting = other.consume(["q"])
    wait_until(lambda: len(other.inspector().workers()) == 2, 5, "two workers")
    partial.hang_newcomers()
    with server.client() as client:
        client.client_kill_filter(_type="pubsub", skipme=True)
    assert waiting.receive(5, 1) == []
    assert list(holders(other, "q").values()) == [1]
    partial.release()
    engine.close()
    other.close()


@REDIS
def test_a_subscription_that_ended_unseen_is_renewed(
        server: RedisServer, partial: PartialProxy, prefix: str) -> None:
    """A network that forgets silent connections: the server closes its end, this process never hears of it."""
    engine = connect(server.url(port=partial.port), prefix=prefix, visibility_timeout=3)
    consumer = engine.consume(["q"])
    consumer.receive(0)
    with server.client() as client:
        def subscription() -> dict[str, str] | None:
            return next((row for row in client.client_list(_type="pubsub")
                         if int(row["addr"].rpartition(":")[2]) in ports), None)

        with partial._changed:
            ports = {link.sockets["down"].getsockname()[1]: link.sockets["up"].getpeername()[1]
                     for link in partial._links}
        holder = engine.inspector().workers()[0].holder
        channel = f"{prefix}/0/alive/{holder}"
        wait_until(lambda: client.pubsub_numsub(channel)[0][1] == 1, 5, "the worker shows that it lives")
        with partial._changed:
            ports = {link.sockets["down"].getsockname()[1]: link.sockets["up"].getpeername()[1]
                     for link in partial._links}
        row = subscription()
        assert row is not None
        partial.freeze_one(ports[int(row["addr"].rpartition(":")[2])])
        client.client_kill_filter(_id=row["id"])
        assert client.pubsub_numsub(channel)[0][1] == 0
        wait_until(lambda: client.pubsub_numsub(channel)[0][1] == 1, 6, "the worker shows again that it lives")
    assert engine.inspector().workers()[0].holder == holder
    engine.close()


@REDIS
def test_a_lost_answer_does_not_wait_for_a_consumer_that_nobody_drives(
        server: RedisServer, proxy: Proxy, prefix: str) -> None:
    from streambroker.engines.redis_streams.scripts import script

    engine = connect(server.url(port=proxy.port), prefix=prefix)
    producer = connect(server.url(), prefix=prefix)
    undriven = engine.consume(["q"])
    consumer = engine.consume(["q"])
    assert consumer.receive(0.3) == []
    producer.publish("q", messages("a"))
    consumer.receive(1)[0]  # that one is held; the next take loses its answer
    proxy.drop_reply(script("take").sha.encode())
    producer.publish("q", messages("b"))
    got = drain(consumer, 1, 12)
    assert bodies(got) == ["b"]
    undriven.close()
    engine.close()
    producer.close()


@REDIS
def test_what_an_old_request_brings_after_the_registry_was_lost_is_protected(server: RedisServer, prefix: str) -> None:
    """A worker that waits when the store is emptied goes on under a new name; its wait carries the old one."""
    mortal = ProcessMortal(server.url(), {"prefix": prefix, "visibility_timeout": 3})
    other = connect(server.url(), prefix=prefix, visibility_timeout=3)
    assert mortal.take("q", 1, 0.3) == []
    with server.client() as client:
        client.delete(f"{prefix}:{{@}}:workers")
        wait_until(lambda: client.hlen(f"{prefix}:{{@}}:workers") == 1, 5, "the worker is known again")
    other.publish("q", messages("a"))
    assert len(mortal.take("q", 1, 6)) == 1
    wait_until(lambda: list(holders(other, "q").values()) == [1], 5, "its delivery belongs to a known worker")
    mortal.die()
    assert bodies(drain(other.consume(["q"]), 1, 8)) == ["a"]
    other.close()


GREEN = """
from gevent import monkey; monkey.patch_all()
import sys, gevent
from integration.ledger import Ledger
from integration.rig import CeleryRig
from integration.stores import Server
from streambroker import connect
from streambroker.message import Message
engine = connect(sys.argv[1], prefix=sys.argv[2], visibility_timeout=2)
consumer = engine.consume(["q"])
def publish():
    while True:
        engine.publish("other", [Message(b"x")])
        gevent.sleep(0.001)
gevent.spawn(publish)
gevent.sleep(0.5)
# as after a minute: what is known of the queues is out of date
if sys.argv[1].startswith("jetstream"):
    engine.queues._learnt.clear()
else:
    engine.queues._table._copy = (float("-inf"), *engine.queues._table._copy[1:])
print("ready", flush=True)
while not (got := consumer.receive(1)):
    pass
print("got", got[0].message.body.decode(), flush=True)
"""


def test_the_keeper_recovers_beside_greenlets(server: Server, prefix: str) -> None:
    mortal = ProcessMortal(server.url(), {"prefix": prefix, "visibility_timeout": 2})
    engine = connect(server.url(), prefix=prefix)
    engine.publish("q", messages("a"))
    assert len(mortal.take("q", 1)) == 1
    green = subprocess.Popen([sys.executable, "-c", GREEN, server.url(), prefix], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert green.stdout is not None and green.stderr is not None
    try:
        assert green.stdout.readline() == "ready\n"
        mortal.die()
        assert green.stdout.readline() == "got a\n"
    finally:
        green.kill()
        _, errors = green.communicate()
        mortal.die()
        engine.close()
    assert "Traceback" not in errors


def test_a_time_limit_while_connecting_is_what_it_is(fresh: Callable[..., Server]) -> None:
    server = fresh(aof=False)
    engine = connect(server.url())

    def over(number: int, frame: object) -> None:
        raise TimeLimit

    previous = signal.signal(signal.SIGALRM, over)
    server.freeze()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(TimeLimit):
            engine.publish("q", messages("a"))
    finally:
        server.thaw()
        signal.signal(signal.SIGALRM, previous)
    engine.close()


def test_a_celery_worker_ends_within_seconds_though_the_store_is_frozen(
        fresh: Callable[..., Server], celery: CeleryRig, ledger: Ledger) -> None:
    server = fresh(aof=False)
    celery.use(server.url(), queues=["a", "b", "c"])
    worker = celery.worker()
    celery.send("work", "one")
    ledger.wait("end", 1, 20)
    server.freeze()
    time.sleep(3)  # an answer is overdue, nothing can be awaited
    try:
        assert worker.stop(signal.SIGTERM, timeout=40) < 20
    finally:
        server.thaw()
