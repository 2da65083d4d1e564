"""Where messages go and in which order: exchanges, routes, broadcasts, priorities, results, and every way to name the
broker."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, group
from kombu import Connection, Consumer, Queue
from kombu.mixins import ConsumerMixin
from kombu.utils.limits import TokenBucket

from integration.apps.broadcasts import add_broadcast
from integration.apps.celery_app import make_chord
from integration.base import leftovers
from integration.command import environment
from integration.ledger import Ledger
from integration.rig import CeleryRig
from integration.stores import Server
from streambroker.embedded import free_port
from streambroker.testing.faults import Proxy
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import wait_until

pytestmark = pytest.mark.stores

QUICK = ["--without-mingle", "--without-gossip"]


def order(ledger: Ledger) -> list[str]:
    return [line.id for line in ledger.lines("start")]


# ---------------------------------------------------------------- exchanges and queues

@pytest.mark.usefixtures("at_base")
def test_exchanges_and_routes(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    """Topic with patterns, direct and fanout exchanges, routes by name and by pattern."""
    celery.use(server.url(), conf={
        "task_default_queue": "main",
        "task_queues": {
            "main": {"exchange": "main", "routing_key": "main"},
            "images": {"exchange": "media", "exchange_type": "topic", "routing_key": "image.*"},
            "media": {"exchange": "media", "exchange_type": "topic", "routing_key": "#"},
            "eu": {"exchange": "feeds", "exchange_type": "direct", "routing_key": "eu"},
            "fan.one": {"exchange": "fan", "exchange_type": "fanout", "routing_key": ""},
            "fan.two": {"exchange": "fan", "exchange_type": "fanout", "routing_key": "unused"}},
        "task_routes": {"failing": {"queue": "eu"}, "retry*": {"exchange": "media", "routing_key": "video.long"}}})
    celery.flag("fixed")
    worker = celery.worker(pool="threads", concurrency=4, options=QUICK)
    for name, exchange, key in (("image", "media", "image.small"), ("deep", "media", "image.small.grey"),
                                ("eu", "feeds", "eu"), ("fan", "fan", "whatever")):
        celery.send("work", name, exchange=exchange, routing_key=key)
    celery.send("failing", "routed")
    celery.send("retrying", "by-pattern", 0)
    celery.send("work", "default")
    ledger.wait("end", 7, timeout=10)
    wait_until(lambda: len(ledger.lines("end")) == 9, 10, "a run for each queue")
    runs = order(ledger)
    assert {name: runs.count(name) for name in set(runs)} == {
        "image": 2, "deep": 1, "eu": 1, "fan": 2, "routed": 1, "by-pattern": 1, "default": 1}
    keys = {line.id: line.facts["routing_key"] for line in ledger.lines("start")}
    assert keys["deep"] == "image.small.grey"
    assert keys["by-pattern"] == "video.long"
    worker.stop()


@pytest.mark.usefixtures("at_base")
def test_a_broadcast_task_runs_on_every_worker(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    """Once on each, acknowledged like any other; nothing is left for workers that are gone, and those get none."""
    celery.use(server.url(), conf={"imports": ["integration.apps.broadcasts"]})
    add_broadcast(celery.app)
    workers = [celery.worker(name, start=False, pool=pool, options=QUICK) for name, pool in
               (("one", "prefork"), ("two", "threads"), ("three", "solo"))]
    celery.start(*workers)
    celery.app.tasks["work"].apply_async(("to-all",), queue="everyone")
    wait_until(lambda: len(ledger.lines("end")) == 3, 10, "a run on each")
    workers[0].stop()
    celery.app.tasks["work"].apply_async(("to-both",), queue="everyone")
    celery.send("work", "to-one")
    wait_until(lambda: len(ledger.lines("end")) == 6, 10, "a run on each of two, and one")
    hosts = {name: sorted(line.facts["host"].partition("@")[0] for line in ledger.lines("start") if line.id == name)
             for name in ("to-all", "to-both")}
    assert hosts == {"to-all": ["one", "three", "two"], "to-both": ["three", "two"]}
    celery.finish()


def test_the_length_of_a_queue_is_known_to_everybody(server: Server, celery: CeleryRig) -> None:
    """Rows 105, 107: a passive declaration, which exporters use, tells what waits, with a prefix too."""
    celery.use(server.url())
    celery.send_all("work", [f"waiting-{number}" for number in range(7)])
    celery.send("work", "waiting-prior", priority=9)
    celery.send("work", "later", countdown=60)
    with Connection(server.url(), transport_options={"global_keyprefix": celery.prefix}) as other:
        declared = other.default_channel.queue_declare("celery", passive=True)
        assert (declared.message_count, declared.consumer_count) == (8, 0)
        with pytest.raises(other.channel_errors, match="no queue 'nowhere'"):
            other.default_channel.queue_declare("nowhere", passive=True)
        worker = celery.worker(pool="solo", options=QUICK)
        celery.wait_stats(ready=0, in_flight=0)
        declared = other.default_channel.queue_declare("celery", passive=True)
        assert (declared.message_count, declared.consumer_count) == (0, 1)
    worker.stop()


# ---------------------------------------------------------------- priorities

@pytest.mark.parametrize(("options", "first"), [({}, 0), ({"priority_order": "amqp"}, 9)], ids=["redis", "amqp"])
def test_priorities_are_served_in_their_order(server: Server, celery: CeleryRig, ledger: Ledger, first: int,
                                              options: dict[str, Any]) -> None:
    """Rows 90, 91: 0 first, or 9 where that is asked for; within a step first in first out."""
    celery.use(server.url(), **options)
    names = {priority: [f"p{priority}-{number}" for number in range(4)] for priority in (9, 3, 0, 6)}
    for number in range(4):
        for priority in names:
            celery.send("work", names[priority][number], priority=priority)
    worker = celery.worker(pool="solo", options=QUICK)
    ledger.wait("end", 16, timeout=10)
    assert order(ledger) == [name for priority in sorted(names, reverse=bool(first)) for name in names[priority]]
    worker.stop()


def test_priorities_hold_across_workers(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    """Row 90: three workers of one slot each drain 60 messages: none starts before a more urgent one, but for those
    that start in the same moment. A late urgent one overtakes all that wait."""
    celery.use(server.url())
    for number in range(60):
        celery.send("work", f"p{(9, 6, 3, 0)[number % 4]}-{number}", 0.05, priority=(9, 6, 3, 0)[number % 4])
    workers = [celery.worker(start=False, pool="threads", concurrency=1, options=QUICK) for _ in range(3)]
    celery.start(*workers)
    wait_until(lambda: any(name.startswith("p9") for name in order(ledger)), 15, "the last step has begun")
    celery.send("work", "urgent", priority=0)
    before = len(order(ledger))
    ledger.wait("end", 61, timeout=15)
    started = order(ledger)
    assert started.index("urgent") <= before + len(workers)
    started.remove("urgent")
    steps = [int(name[1]) for name in started]
    assert all(step <= later for place, step in enumerate(steps) for later in steps[place + len(workers):])
    celery.finish()


def test_priorities_outside_of_the_range(server: Server, celery: CeleryRig, ledger: Ledger,
                                         caplog: pytest.LogCaptureFixture) -> None:
    """Row 89: they count as the nearest that there is, and that is told once."""
    celery.use(server.url())
    with caplog.at_level(logging.WARNING, "streambroker"):
        for name, priority in (("fifty", 50), ("nine", 9), ("minus", -1), ("none", None), ("zero", 0)):
            celery.send("work", name, priority=priority)
    assert sum("outside 0 to 9" in record.getMessage() for record in caplog.records) == 1
    worker = celery.worker(pool="solo", options=QUICK)
    ledger.wait("end", 5, timeout=10)
    assert order(ledger) == ["minus", "none", "zero", "fifty", "nine"]
    worker.stop()


# ---------------------------------------------------------------- how much a worker takes

def test_without_prefetch_an_idle_worker_gets_what_waits(server: Server, celery: CeleryRig,
                                                         ledger: Ledger) -> None:
    """Row 87: `worker_disable_prefetch` with early acknowledgement."""
    celery.use(server.url(), conf={"worker_disable_prefetch": True, "task_acks_late": False,
                                   "worker_prefetch_multiplier": 8})
    celery.send_all("hold", [f"held-{number}" for number in range(6)])
    one = celery.worker("one", concurrency=2, options=QUICK)
    ledger.wait("start", 2, timeout=10)
    two = celery.worker("two", concurrency=2, pool="threads", options=QUICK)
    ledger.wait("start", 4, timeout=10)
    celery.wait_stats(ready=2, in_flight=0)
    hosts = [line.facts["host"].partition("@")[0] for line in ledger.lines("start")]
    assert (hosts.count("one"), hosts.count("two")) == (2, 2)
    celery.flag("release")
    ledger.wait("end", 6, timeout=10)
    assert one.alive and two.alive
    celery.finish()


@pytest.mark.usefixtures("at_base")
def test_a_busy_worker_grows_and_an_idle_one_shrinks(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    celery.use(server.url())
    worker = celery.worker(options=["--autoscale", "4,1", *QUICK], env={"AUTOSCALE_KEEPALIVE": "1"})
    assert len(worker.children()) == 1
    celery.send_all("hold", [f"held-{number}" for number in range(4)])
    ledger.wait("start", 4, timeout=15)
    assert len(worker.children()) == 4
    celery.flag("release")
    ledger.wait("end", 4, timeout=10)
    wait_until(lambda: len(worker.children()) == 1, 15, "one process is left", pause=0.1)
    celery.send("work", "after")
    ledger.wait_ids("end", ["after"], 10)
    worker.stop()


@pytest.mark.usefixtures("at_base")
def test_processes_are_replaced_after_their_tasks(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    """New children are forked from a worker that is connected and busy; tasks publish from them."""
    celery.use(server.url())
    worker = celery.worker(concurrency=2, options=["--max-tasks-per-child", "1", *QUICK])
    for number in range(3):
        celery.send("publishing", f"parent-{number}", [f"child-{number}-a", f"child-{number}-b"])
    ledger.wait("end", 9, timeout=30)
    celery.wait_stats(ready=0, in_flight=0, dead=0)
    assert len({line.pid for line in ledger.lines("start")}) == 9
    verdict = ledger.verdict()
    assert verdict.clean and not verdict.doubled
    worker.stop()


# ---------------------------------------------------------------- results

@pytest.mark.usefixtures("at_base")
def test_results_over_the_broker(server: Server, celery: CeleryRig) -> None:
    """`rpc://`: waited for, and asked for after they came; many at once."""
    celery.use(server.url(), backend="rpc://")
    worker = celery.worker(options=QUICK)
    add = celery.app.tasks["add"]
    assert add.delay(1, 2).get(timeout=10) == 3
    results = [add.delay(number, number) for number in range(50)]
    celery.wait_stats(ready=0, in_flight=0)
    assert [result.get(timeout=10) for result in results] == [2 * number for number in range(50)]
    assert group(add.s(number, 1) for number in range(10))().get(timeout=10) == list(range(1, 11))
    assert chain(add.s(1, 1), add.s(2), add.s(3))().get(timeout=10) == 7
    failed = celery.send("failing", "sad")
    with pytest.raises(RuntimeError, match="as asked"):
        failed.get(timeout=10)
    celery.app.backend.result_consumer.stop()
    worker.stop()


@pytest.mark.usefixtures("at_base")
def test_results_in_the_store(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    celery.use(server.url(), backend=server.result_url())
    worker = celery.worker(options=QUICK)
    add = celery.app.tasks["add"]
    assert group(add.s(number, 1) for number in range(10))().get(timeout=10) == list(range(1, 11))
    assert chain(add.s(1, 1), add.s(2), add.s(3))().get(timeout=10) == 7
    assert make_chord(celery.app, "sum", 12)().get(timeout=10) == sum(range(12))
    assert celery.send("retrying", "again", 2, countdown=0.3).get(timeout=10) is None
    assert order(ledger) == ["sum", "again", "again", "again"]
    worker.stop()


# ---------------------------------------------------------------- ways to name the broker

def runs(celery: CeleryRig, name: str, **options: Any) -> None:
    """A worker runs a task that this process sends, over what `celery.use` says."""
    worker = celery.worker(name, pool="threads", options=QUICK, **options)
    celery.send("work", name)
    celery.ledger.wait_ids("end", [name], 10)
    worker.stop()


def test_the_names_of_the_broker(server: Server, celery: CeleryRig) -> None:
    if isinstance(server, NatsServer):
        plain = server.url("nats")
        ways = [("by-transport", plain, {"broker_transport": "jetstream"}),
                ("by-class", plain, {"broker_transport": "streambroker.kombu.transport:JetStreamTransport"})]
    else:
        plain = server.url("redis")
        ways = [("valkey", server.url("valkey-streams"), {}),
                ("by-transport", plain, {"broker_transport": "redis-streams"}),
                ("by-class", plain, {"broker_transport": "streambroker.kombu.transport:RedisStreamsTransport"}),
                ("nested", f"redis-streams+{plain}", {})]
    for name, url, conf in ways:
        celery.use(url, conf=conf)
        runs(celery, name)


@pytest.mark.only_on("redis", "a nats-server has no unix socket")
def test_a_unix_socket(fresh: Callable[..., Server], celery: CeleryRig) -> None:
    server = fresh(unix_socket=True)
    celery.use(server.url("redis-streams+unix", db=3))
    runs(celery, "local")
    assert {place[0] for place in server.base().keys} == {3}


@pytest.mark.parametrize("many", [lambda urls: ";".join(urls), list], ids=["semicolons", "list"])
def test_the_next_broker_is_used_when_one_is_gone(fresh: Callable[..., Server], celery: CeleryRig,
                                                  ledger: Ledger, many: Callable[[list[str]], Any]) -> None:
    """The first never answers, the second does and dies: worker and producer go on with the third."""
    second, third = fresh(), fresh()
    urls = [second.url(port=free_port()), second.url(), third.url()]
    celery.use(many(urls), reconnect_timeout=0.2, publish_timeout=0.2)
    worker = celery.worker(pool="threads", options=QUICK)
    celery.send("work", "on-second")
    ledger.wait_ids("end", ["on-second"], 10)
    second.kill()
    celery.send("work", "on-third")
    ledger.wait_ids("end", ["on-third"], 20)
    if isinstance(third, NatsServer):
        # all are servers of one link
        assert worker.count(f"connected to 127.0.0.1:{third.port} again") == 1
    else:
        assert worker.count("Connected to redis-streams") == 2
    worker.stop()
    assert leftovers(third, celery.prefix) == []


# ---------------------------------------------------------------- plain Kombu

@pytest.fixture
def plain(server: Server, prefix: str) -> Any:
    with Connection(server.url(), transport_options={"global_keyprefix": prefix}) as connection:
        yield connection


@pytest.mark.usefixtures("at_base")
def test_simple_queue(plain: Connection) -> None:
    with plain.clone() as connection, connection.SimpleQueue("simple") as queue:
        for number in range(3):
            queue.put({"number": number})
        assert len(queue) == 3
        queue.get(timeout=5).requeue()
        got = {message.payload["number"]: message for message in (queue.get(timeout=5) for _ in range(3))}
        assert [got[number].delivery_info["redelivered"] for number in range(3)] == [True, False, False]
        got[0].ack()
        got[1].ack()
        with pytest.raises(queue.Empty):
            queue.get_nowait()
        with pytest.raises(queue.Empty):
            queue.get(timeout=0.1)
    with plain.SimpleQueue("simple") as queue:
        last = queue.get(timeout=5)  # closing had given it back
        assert last.payload == {"number": 2}
        last.ack()
        assert queue.clear() == 0
    assert plain.default_channel.queue_delete("simple") == 0


@pytest.mark.usefixtures("at_base")
def test_consumer_mixin_and_batches(server: Server, plain: Connection, prefix: str, proxy: Proxy) -> None:
    """A batch of a producer is one request for each queue; the mixin survives a lost connection."""
    queues = [Queue("first", routing_key="first"), Queue("second", routing_key="second")]
    got: list[Any] = []

    class Mixin(ConsumerMixin):
        def __init__(self, connection: Connection) -> None:
            self.connection = connection
            self.restart_limit = TokenBucket(100)

        def get_consumers(self, Consumer: type[Consumer], channel: Any) -> list[Consumer]:
            return [Consumer(queues, callbacks=[self.on_message], prefetch_count=10)]

        def on_message(self, body: Any, message: Any) -> None:
            got.append(body)
            message.ack()

    mixin = Mixin(Connection(server.url(port=proxy.port), transport_options={
        "global_keyprefix": prefix, "reconnect_timeout": 0.2}))
    thread = threading.Thread(target=mixin.run)
    thread.start()
    try:
        with plain.Producer() as producer, producer.batch(50):
            for number in range(100):
                producer.publish(number, routing_key=("first", "second")[number % 2], declare=[queues[number % 2]])
        wait_until(lambda: len(got) == 100, 10, "all messages")
        assert sorted(got) == list(range(100))
        assert proxy.reset() > 0
        with plain.Producer() as producer:
            producer.publish("after", routing_key="first")
        wait_until(lambda: got[-1] == "after", 10, "a message after the cut")
    finally:
        mixin.should_stop = True
        thread.join(10)
    assert not thread.is_alive()
    mixin.connection.release()


# ---------------------------------------------------------------- leftovers of clients

#: asks all workers in 30 threads, each with a reply queue of its own, and is killed before it reads an answer
_ASK = """
import os, signal, sys, threading
from integration.apps.celery_app import app
from kombu.pidbox import Mailbox

asked = threading.Barrier(31)
Mailbox._collect = lambda self, *args, **kwargs: asked.wait() and threading.Event().wait()
for _ in range(30):
    threading.Thread(target=lambda: app.control.inspect(timeout=60).stats(), daemon=True).start()
asked.wait()
print("asked", flush=True)
sys.stdin.read()
"""


def test_clients_that_are_killed_leave_nothing(server: Server, celery: CeleryRig) -> None:
    """Rows 68, 69: reply queues, their messages and their bindings go when nobody fetches them."""
    celery.use(server.url(), conf={"control_queue_expires": 2.0, "broker_pool_limit": 0})
    worker = celery.worker(pool="threads")
    celery.app.control.ping(timeout=5, limit=1)
    celery.send("work", "first")
    celery.ledger.wait("end", 1, timeout=10)
    celery.wait_stats(in_flight=0)
    # the names of a nats-server begin with the account
    pattern = f"*{celery.prefix}*"
    base = server.base(pattern)
    bindings = celery.engine.table("bindings")
    bound = set(bindings.rows())
    client = subprocess.Popen([sys.executable, "-c", _ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              env={**os.environ, **environment(celery.settings)})
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == b"asked\n"
        assert len(set(bindings.rows()) - bound) >= 30
        assert sum(".reply." in queue for queue in celery.engine.inspector().queues()) >= 30
    finally:
        os.kill(client.pid, signal.SIGKILL)
        client.communicate()
    # versions, bells, last sequences of producers; and traces of removed rows
    passing = ["*:p:*", "*:{@}:v:*", "*:{@}:server", "*:bell", "*_state"]
    wait_until(lambda: not base.difference(server.base(pattern), passing), 20,
               f"back at base: {base.difference(server.base(pattern), passing)}", pause=0.2)
    wait_until(lambda: set(bindings.rows()) == bound, 5, "their bindings are gone")
    assert celery.app.control.ping(timeout=5, limit=1) == [{f"w0@{socket.gethostname()}": {"ok": "pong"}}]
    worker.stop()


def test_pings_are_answered_under_load(server: Server, celery: CeleryRig) -> None:
    """Row 58."""
    celery.use(server.url())
    node = f"busy@{socket.gethostname()}"
    worker = celery.worker("busy", options=QUICK)
    names = celery.send_all("work", [f"load-{number}" for number in range(500)])
    answered = 0
    while not set(names) <= celery.ledger.ids("end"):
        began = time.monotonic()
        assert celery.app.control.ping([node], timeout=5, limit=1) == [{node: {"ok": "pong"}}]
        assert time.monotonic() - began < 2
        answered += 1
    assert answered >= 5
    worker.stop()
