"""Publishing from programs of all kinds: every publish that returned is there once, and whoever asks for the impossible
is told."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection, Exchange, Producer, Queue
from kombu.exceptions import OperationalError

from integration.command import environment
from integration.rig import CeleryRig
from integration.stores import Server, can_be_full, connects, full, lose_tables, mark
from streambroker.errors import MessageTooLarge, StoreError
from streambroker.testing.faults import Proxy
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import wait_until

# most on Valkey alone unless `--server` asks for more: the adapter does most of it, and it takes minutes

#: what the programs below have in common: `crowd(name)` publishes from eight threads and notes it in the ledger
_PROGRAM = """
import multiprocessing, os, signal, sys, threading, time
from integration.apps.celery_app import app
from integration.ledger import append
ledger = sys.argv[1]

def publish(name, count):
    for number in range(count):
        app.tasks["work"].delay(f"{name}-{number}")
        append(ledger, "published", f"{name}-{number}", due=0.0)

def crowd(name, count=15):
    threads = [threading.Thread(target=publish, args=(f"{name}.{number}", count)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def program(celery: CeleryRig, text: str, **options: Any) -> subprocess.Popen[str]:
    """A program of a user, started."""
    return subprocess.Popen([sys.executable, "-c", _PROGRAM + text, str(celery.ledger.path)], text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env={**os.environ, **environment(celery.settings)}, **options)


def run(celery: CeleryRig, text: str, timeout: float = 60) -> str:
    """What it prints. AssertionError when it fails or does not end."""
    started = program(celery, text)
    try:
        output, _ = started.communicate(timeout=timeout)
    finally:
        started.kill()
    assert started.returncode == 0, output
    return output


def stored(celery: CeleryRig, queue: str = "celery") -> Counter[str]:
    """The names of all messages in a queue, taken out of it."""
    names: Counter[str] = Counter()
    consumer = celery.engine.consume([queue], no_ack=True)
    try:
        while got := consumer.fetch(500):
            names.update(json.loads(delivery.message.body)[0][0] for delivery in got)
    finally:
        consumer.close()
    return names


def all_stored_once(celery: CeleryRig, count: int) -> None:
    published = celery.ledger.ids("published")
    assert len(published) == count
    assert stored(celery) == Counter(published)


# ---------------------------------------------------------------- forks

#: a process that has published forks four children, from which eight threads publish, as do its own meanwhile
FORKS = """
crowd("before")
children = []
for number in range(4):
    child = os.fork()
    if not child:
        crowd(f"child{number}")
        os._exit(0)
    children.append(child)
crowd("after")
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""
#: the same while the parent's threads are in the middle of publishing
FORKS_IN_THE_MIDDLE = """
publish("first", 1)
threads = threading.Thread(target=crowd, args=("before", 40))
threads.start()
children = []
for number in range(4):
    time.sleep(0.05)
    child = os.fork()
    if not child:
        # a new application: Kombu's pools may have been in use in that moment
        from integration.apps.celery_app import AppSettings, VARIABLE, make_app
        import json
        app = make_app(AppSettings(**json.loads(os.environ[VARIABLE])))
        crowd(f"child{number}", 5)
        os._exit(0)
    children.append(child)
threads.join()
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""
MULTIPROCESSING = """
publish("before", 1)
def job(number):
    crowd(f"job{number}", 3)
with multiprocessing.get_context("fork").Pool(3, maxtasksperchild=2) as pool:
    pool.map(job, range(8), chunksize=1)
    pool.close()
    pool.join()
publish("after", 1)
"""
#: a server that imports the application, publishes, forks its workers and ends them by a signal
PRELOAD = """
publish("preload", 3)
def end(number, frame):
    sys.exit(0)
workers = []
for number in range(4):
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, end)
        try:
            crowd(f"worker{number}", 5)
            print("idle", flush=True)
            while True:
                time.sleep(10)
        finally:
            publish(f"last{number}", 1)
    workers.append(child)
sys.stdin.readline()
for child in workers:
    os.kill(child, signal.SIGTERM)
codes = [os.waitpid(child, 0)[1] for child in workers]
publish("master", 1)
sys.exit(any(codes))
"""


@pytest.mark.parametrize(("text", "count"), [(FORKS, 6 * 8 * 15), (FORKS_IN_THE_MIDDLE, 1 + 8 * 40 + 4 * 8 * 5),
                                             (MULTIPROCESSING, 2 + 8 * 8 * 3)],
                         ids=["fork", "fork in the middle", "multiprocessing"])
@pytest.mark.parametrize("confirm", ["each", "deferred"])
def test_every_publish_of_a_family_of_processes_is_there_once(server: Server, celery: CeleryRig, text: str,
                                                              count: int, confirm: str) -> None:
    celery.use(server.url(), confirm=confirm)
    run(celery, text)
    all_stored_once(celery, count)


def test_every_publish_of_a_preloaded_server_is_there_once(server: Server, celery: CeleryRig) -> None:
    celery.use(server.url())
    web = program(celery, PRELOAD)
    try:
        assert web.stdout is not None
        wait_until(lambda: len(celery.ledger.ids("published")) == 3 + 4 * 8 * 5, 30, "all workers have published")
        output, _ = web.communicate("end\n", timeout=30)
    finally:
        web.kill()
    assert web.returncode == 0, output
    all_stored_once(celery, 3 + 4 * 8 * 5 + 4 + 1)




@pytest.mark.parametrize("patch", ["from gevent import monkey; monkey.patch_all()",
                                   "import eventlet; eventlet.monkey_patch()"], ids=["gevent", "eventlet"])
def test_publishing_from_greenlets(fresh: Callable[..., Server], celery: CeleryRig, patch: str) -> None:
    """Row 113: each is stored once, over few connections."""
    server = fresh()
    celery.use(server.url())
    # patched before anything else is imported, and the threads of `crowd` are greenlets
    source = f"{patch}\n{_PROGRAM}\ncrowd('green', 60)\n"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", source, str(celery.ledger.path)], timeout=60,
                          env={**os.environ, **environment(celery.settings)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Kombu looks once for each of its eight pooled connections whether the store is there; one asks
    assert connects(server) <= 5 + 8 + 1
    all_stored_once(celery, 8 * 60)


# ---------------------------------------------------------------- lost answers

@pytest.mark.stores
@pytest.mark.parametrize("patience", [10.0, 0.0], ids=["repeated by us", "repeated by Kombu"])
@pytest.mark.parametrize(("place", "options"), [
    ({}, {}), ({"step": 1}, {"priority": 3}), ({"delayed": True}, {"countdown": 60})],
    ids=["plain", "priority", "countdown"])
def test_a_publish_whose_answer_is_lost_is_there_once(
        server: Server, proxy: Proxy, celery: CeleryRig, place: dict[str, Any], options: dict[str, Any],
        patience: float) -> None:
    """The store has run it, the answer never came: it is repeated, and known to the store."""
    celery.use(server.url(port=proxy.port), publish_timeout=patience)
    celery.send("work", "first", **options)
    for number in range(3):
        proxy.drop_reply(mark(server, celery.prefix, **place))
        celery.send("work", f"repeated-{number}", **options)
        proxy.wait_dropped(number + 1)
    celery.send("work", "last", **options)
    stats = celery.stats()
    assert stats.ready + stats.delayed == 5
    if not stats.delayed:
        assert stored(celery) == Counter(celery.ledger.ids("published"))


def test_a_batch_whose_answer_is_lost_is_there_once(server: Server, proxy: Proxy, celery: CeleryRig) -> None:
    celery.use(server.url(port=proxy.port))
    celery.send("work", "first")
    proxy.drop_reply(mark(server, celery.prefix))
    celery.send_all("work", [f"batch-{number}" for number in range(1200)])
    proxy.wait_dropped()
    all_stored_once(celery, 1201)


def test_publishing_from_threads_while_the_server_is_killed(fresh: Callable[..., Server],
                                                            celery: CeleryRig) -> None:
    """Row 29: what returned is there, once; what raised is there at most once."""
    server = fresh(fsync="always")
    celery.use(server.url(), publish_timeout=8)
    over, raised = threading.Event(), Counter[str]()

    def publish(thread: int) -> None:
        for number in range(100_000):
            if over.is_set():
                return
            try:
                celery.send("work", f"{thread}-{number}")
            except OperationalError:
                raised[f"{thread}-{number}"] += 1

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            seen = len(celery.ledger.ids("published"))
            wait_until(lambda seen=seen: len(celery.ledger.ids("published")) > seen + 50, 20, "some more are published")
            server.restart(hard=True)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    found, published = stored(celery), celery.ledger.ids("published")
    assert [name for name, count in found.items() if count > 1] == []
    assert published - found.keys() == set()
    assert found.keys() - published <= raised.keys()


# ---------------------------------------------------------------- deferred confirmation

DEFERRED = """
publish("deferred", 300)
{end}
"""


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "app.close()", "raise SystemExit", "app.pool.force_close_all()"])
def test_a_clean_exit_loses_nothing_that_is_not_yet_confirmed(server: Server, celery: CeleryRig,
                                                              end: str) -> None:
    celery.use(server.url(), confirm="deferred")
    run(celery, DEFERRED.format(end=end))
    all_stored_once(celery, 300)


def test_a_clean_exit_while_the_link_breaks_loses_nothing(server: Server, celery: CeleryRig,
                                                          proxy: Proxy) -> None:
    """The last publish is under way on a link that ends: it is sent again before the program ends."""
    celery.use(server.url(port=proxy.port), confirm="deferred")
    started = program(celery, 'publish("before", 10)\nprint("ready", flush=True)\nsys.stdin.readline()\n'
                              'publish("last", 1)\n')
    try:
        assert started.stdout is not None and started.stdout.readline() == "ready\n"
        proxy.drop_reply(mark(server, celery.prefix))
        output, _ = started.communicate("go\n", timeout=30)
    finally:
        started.kill()
    assert started.returncode == 0, output
    proxy.wait_dropped()
    all_stored_once(celery, 11)


def test_an_error_of_a_deferred_publish_shows_with_the_next_one(fresh: Callable[..., Server], kind: str,
                                                                celery: CeleryRig) -> None:
    server = fresh(**can_be_full(kind))
    celery.use(server.url(), confirm="deferred", publish_timeout=0.5)
    celery.send("work", "first")
    with full(server, celery.prefix) as refusal, pytest.raises(OperationalError, match=refusal):
        for number in range(2):
            celery.app.tasks["work"].apply_async((f"refused-{number}",), retry=False)
    celery.send("work", "second")
    celery.send("work", "third")
    names = stored(celery)
    assert {"first", "second", "third"} <= names.keys()
    assert max(names.values()) == 1


@pytest.mark.stores
def test_a_store_that_is_away_is_told_of_in_time(fresh: Callable[..., Server], kind: str, celery: CeleryRig) -> None:
    """`publish_timeout` and what Celery's own policy of repeating adds; then every try finds the same out at once."""
    server = fresh()
    celery.use(server.url(), publish_timeout=1)
    celery.send("work", "first")
    server.kill()
    for bound in (4.0, 3.0):
        began = time.monotonic()
        with pytest.raises(OperationalError):
            celery.send("work", "refused")
        assert time.monotonic() - began < bound
    server.start()
    celery.send("work", "second")
    assert set(stored(celery)) == {"first", "second"}


# ---------------------------------------------------------------- what cannot be published

def test_too_large_a_message_is_refused(server: Server, celery: CeleryRig) -> None:
    """Before anything is sent, and nothing else suffers; the limit is 64 MB unless it is set, or the server's."""
    celery.use(server.url(), max_message_size=10_000)
    with pytest.raises(MessageTooLarge, match="max_message_size"):
        celery.app.tasks["work"].delay("large", 0, "x" * 10_000)
    celery.send("work", "small")
    assert stored(celery) == Counter(["small"])
    with Connection(server.url(), transport_options={"global_keyprefix": celery.prefix}) as connection:
        producer = Producer(connection.channel())
        most = (8 if isinstance(server, NatsServer) else 64) * 1024 * 1024
        with pytest.raises(MessageTooLarge, match=str(most)):
            producer.publish(b"x" * (most + 1), routing_key="celery", serializer=None,
                             content_type="application/data", content_encoding="binary")
        producer.publish({"small": True}, routing_key="celery")
    celery.wait_stats(ready=1)


@pytest.mark.only_on("redis", "streams of a nats-server have no types")
@pytest.mark.parametrize(("key", "options"), [(":s:0", {}), (":s:3", {"priority": 9}), (":delay", {"countdown": 60})])
def test_a_key_of_another_type_is_told(server: Server, celery: CeleryRig, key: str,
                                       options: dict[str, Any]) -> None:
    """To the one who publishes there; other queues do not suffer."""
    celery.use(server.url(), queues=["good", "bad"])
    with server.client() as client:
        client.set(f"{celery.prefix}:{{bad}}{key}", "of another program")
        with pytest.raises(StoreError, match="another type"):
            celery.app.tasks["work"].apply_async(("refused",), queue="bad", **options)
        celery.send("work", "good", queue="good", **options)
        assert celery.stats("good").ready + celery.stats("good").delayed == 1
        assert client.get(f"{celery.prefix}:{{bad}}{key}") == b"of another program"


HOSTILE = ["a.b", "a..b", "Q", "q", "ünï ✓", "with space", "{x}", "}{", "@", "%", "%40", "a/b", "*", "[x]", "a:b", "#",
           "line\nfeed", "\0", "'\"; --", "x" * 300, "~free", "celery.pidbox"]


@pytest.mark.usefixtures("at_base")
def test_queues_may_have_any_name(server: Server, celery: CeleryRig) -> None:
    """Each is a queue of its own, whatever is in its name."""
    celery.use(server.url(), queues=HOSTILE)
    for number, queue in enumerate(HOSTILE):
        celery.send("work", f"job-{number}", queue=queue)
    assert [celery.stats(queue).ready for queue in HOSTILE] == [1] * len(HOSTILE)
    worker = celery.worker(pool="threads")
    celery.ledger.wait("end", len(HOSTILE), 15)
    keys = {line.id: line.facts["routing_key"] for line in celery.ledger.lines("start")}
    assert keys == {f"job-{number}": queue for number, queue in enumerate(HOSTILE)}
    assert set(HOSTILE) <= set(celery.engine.inspector().queues())
    worker.stop()


def test_arguments_that_cannot_be_serialized_cost_themselves_alone(server: Server, celery: CeleryRig) -> None:
    celery.use(server.url())
    with pytest.raises(Exception, match="not JSON serializable"):
        celery.app.tasks["work"].delay(object())
    celery.send("work", "fine")
    assert stored(celery) == Counter(["fine"])


# ---------------------------------------------------------------- routes that are not there

def test_lost_routes_are_made_again_by_those_who_declared_them(server: Server, celery: CeleryRig,
                                                               caplog: pytest.LogCaptureFixture) -> None:
    """Row 36: an operator, an eviction or a failover took the tables of exchanges and bindings."""
    celery.use(server.url())
    queue = Queue("kept", Exchange("things", "topic"), routing_key="thing.#")
    with Connection(server.url(), transport_options={"global_keyprefix": celery.prefix}) as connection:
        producer = Producer(connection.channel(), queue.exchange)
        producer.publish(["one"], routing_key="thing.1", declare=[queue])
        with caplog.at_level(logging.WARNING, "streambroker"):
            lose_tables(server, celery.prefix)
            wait_until(lambda: producer.publish(["again"], routing_key="thing.2") is None and
                       celery.engine.ready("kept") >= 2, 5, "it is stored")
        assert "lost the routing" in caplog.text


def test_a_message_that_no_queue_wants_is_told(server: Server, celery: CeleryRig,
                                               caplog: pytest.LogCaptureFixture) -> None:
    """Row 37: a warning, or the queue that was named for such messages."""
    celery.use(server.url())
    options = {"global_keyprefix": celery.prefix}
    with Connection(server.url(), transport_options=options) as connection, \
            caplog.at_level(logging.WARNING, "streambroker"):
        producer = Producer(connection.channel(), Exchange("nobody", "direct", durable=True))
        for number in range(5):
            producer.publish([f"lost-{number}"], routing_key="nowhere")
    assert sum("no queue is bound" in record.getMessage() for record in caplog.records) == 1
    with Connection(server.url(), transport_options={**options, "deadletter_queue": "astray"}) as connection:
        Producer(connection.channel(), Exchange("nobody", "direct", durable=True)).publish(
            [["found"]], routing_key="nowhere")
    assert stored(celery, "astray") == Counter(["found"])


@pytest.mark.only_on("redis", "a nats-server drops nothing from a work queue")
def test_a_store_that_may_drop_keys_is_warned_of(fresh: Callable[..., Server], celery: CeleryRig) -> None:
    """Row 38."""
    server = fresh(arguments=["--maxmemory-policy", "allkeys-lru", "--maxmemory", "100mb"])
    celery.use(server.url())
    worker = celery.worker(pool="solo", options=["--without-mingle"])
    worker.wait_log(r"WARNING.*allkeys-lru", timeout=10)
    worker.stop(signal.SIGTERM)
