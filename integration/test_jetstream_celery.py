"""Celery on a nats-server: what can only go wrong there."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from kombu import Connection, Producer
from kombu.exceptions import OperationalError

from integration.ledger import Ledger
from integration.rig import CeleryRig
from integration.stores import connects, lose_stream, requests
from streambroker.engines.jetstream.names import Names
from streambroker.errors import MessageTooLarge
from streambroker.testing.faults import Proxy
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import wait_until

pytestmark = pytest.mark.only_on("nats", "is about streams and consumers of a nats-server")
QUICK = ["--without-mingle"]
#: how soon after its end a trouble must be over
SOON = 10.0


def consumers(server: NatsServer, prefix: str) -> set[str]:
    """Names of all consumers under a prefix."""
    root = Names(prefix).root
    return {consumer["name"] for stream in server.streams() if stream["name"] in (root, f"{root}_tmp", f"{root}_late")
            for consumer in stream.get("consumer_detail") or ()}


def held(server: NatsServer, stream: str) -> tuple[int, int]:
    """How many messages a stream has, and how many of them its consumers have or had."""
    found = next(each for each in server.streams() if each["name"] == stream)
    details = found.get("consumer_detail") or ()
    return found["state"]["messages"], sum(each["num_ack_pending"] for each in details)


# ---------------------------------------------------------------- trouble

def test_ten_restarts(fresh: Callable[..., NatsServer], celery: CeleryRig, ledger: Ledger) -> None:
    """Rows 137, 138: killed and cleanly, a task after each: it runs soon, in the same worker process."""
    server = fresh()
    celery.use(server.url())
    worker = celery.worker(pool="threads", options=QUICK)
    for number in range(10):
        server.restart(hard=bool(number % 2))
        celery.send("work", f"after-{number}")
        ledger.wait_ids("end", [f"after-{number}"], SOON)
    assert (worker.alive, worker.starts) == (True, 1)
    celery.wait_stats(ready=0, in_flight=0, dead=0)
    verdict = ledger.verdict()
    assert verdict.clean and not verdict.doubled
    assert worker.count("WARNING.*streambroker|Traceback") <= 40
    celery.finish()


def test_a_deleted_consumer_is_made_again_and_told(server: NatsServer, celery: CeleryRig, ledger: Ledger) -> None:
    """Under workers whose tasks run: they keep them, though all is handed out anew."""
    celery.use(server.url())
    celery.start(*(celery.worker(name, start=False, pool="threads", concurrency=2, options=QUICK)
                   for name in ("one", "two")))
    running = celery.send_all("hold", [f"running-{number}" for number in range(3)])
    ledger.wait_ids("start", running, SOON)
    names = Names(celery.prefix)
    assert server.api(f"CONSUMER.DELETE.{names.main}.{names.durable('celery', 0)}")["success"]
    celery.send("work", "after")
    ledger.wait_ids("end", ["after"], SOON)
    wait_until(lambda: any(worker.count("the consumer of queue 'celery' was gone") for worker in celery.workers), SOON,
               "it is told")
    celery.flag("release")
    ledger.wait_ids("end", running, SOON)
    assert ledger.verdict().clean
    celery.finish()


def test_a_deleted_stream_is_made_again_and_told(server: NatsServer, celery: CeleryRig, ledger: Ledger) -> None:
    """What was in it is gone; a task that runs ends well, and all that comes later runs."""
    celery.use(server.url())
    worker = celery.worker(pool="threads", concurrency=2, options=QUICK)
    celery.send("hold", "running")
    ledger.wait_ids("start", ["running"], SOON)
    lose_stream(server, Names(celery.prefix).main)
    for number in range(3):
        celery.send("work", f"after-{number}")
    ledger.wait_ids("end", [f"after-{number}" for number in range(3)], SOON)
    worker.wait_log("the consumer of queue 'celery' was gone")
    celery.flag("release")
    ledger.wait_ids("end", ["running"], SOON)
    celery.wait_stats(ready=0, in_flight=0, dead=0)
    assert ledger.verdict().clean
    celery.finish()


def test_nobody_runs_in_circles_while_jetstream_is_away(fresh: Callable[..., NatsServer], celery: CeleryRig,
                                                        ledger: Ledger) -> None:
    """The server answers 503 to everything, as without a leader: little is asked, little CPU is used; then it goes on,
    by itself."""
    accounts = "accounts { A { jetstream: %s, users: [{user: a, password: b}] } }"
    server = fresh(config=accounts % "enabled")
    celery.use(server.url(user="a", password="b"), publish_timeout=1)
    worker = celery.worker(pool="threads", options=QUICK)
    celery.send("work", "before")
    ledger.wait_ids("end", ["before"], SOON)
    server.configure(accounts % "disabled")
    server.reload()

    def refused() -> bool:
        try:
            celery.app.tasks["work"].apply_async(("refused",), retry=False)
        except OperationalError:
            return True
        return False

    wait_until(refused, SOON, "JetStream is away")
    process, before = psutil.Process(worker.pid), len(worker.text())
    began = process.cpu_times()
    asked = requests(server, 5.0)
    ended = process.cpu_times()
    assert asked < 5 * 30
    assert ended.user + ended.system - began.user - began.system < 1.0
    assert len(worker.text()[before:].splitlines()) < 30
    server.configure(accounts % "enabled")
    server.reload()
    wait_until(lambda: not refused(), SOON, "JetStream is back")
    celery.send("work", "after")
    ledger.wait_ids("end", ["after"], SOON)
    assert worker.alive
    celery.finish()


# ---------------------------------------------------------------- limits of a consumer

def test_thousands_held_or_waiting_stop_no_delivery(server: NatsServer, celery: CeleryRig, ledger: Ledger) -> None:
    """Rows 148, 149: more unsettled messages than the server's default limit of a consumer, and more delayed ones."""
    celery.use(server.url(), conf={"worker_prefetch_multiplier": 1500})
    celery.send_all("hold", [f"held-{number}" for number in range(1500)])
    celery.worker("hoarder", pool="threads", concurrency=1, options=QUICK)
    celery.wait_stats(in_flight=1500, ready=0, timeout=20)
    celery.send_all("work", [f"later-{number}" for number in range(3500)], countdown=600)
    celery.use(server.url())
    celery.worker("idle", pool="threads", concurrency=1, options=QUICK)
    for number in range(10):
        celery.send("work", f"now-{number}")
        ledger.wait_ids("end", [f"now-{number}"], 5)
    stats = celery.stats()
    assert (stats.in_flight, stats.delayed) == (1500, 3500)


@pytest.mark.usefixtures("at_base")
def test_poison_is_not_left_in_the_stream(server: NatsServer, celery: CeleryRig, ledger: Ledger) -> None:
    """Row 151: a limit of the server's own (max_deliver) would leave it there, for nobody."""
    celery.use(server.url(), delivery_limit=2)
    celery.worker(concurrency=1, options=QUICK)
    celery.send("poison", "poison")
    celery.send("work", "neighbour")
    celery.wait_stats(dead=1, ready=0, in_flight=0, timeout=30)
    ledger.wait_ids("end", ["neighbour"], SOON)
    names = Names(celery.prefix)
    wait_until(lambda: held(server, names.main) == (0, 0), 5, "nothing is left in the stream")
    assert len(ledger.starts("poison")) == 2
    assert held(server, names.dead)[0] == 1
    celery.cli("dead", "purge", "-Q", "celery", "--yes")
    celery.finish()


# ---------------------------------------------------------------- who makes what

def test_producers_make_no_consumers(server: NatsServer, celery: CeleryRig) -> None:
    celery.use(server.url())
    for number in range(5):
        celery.send("work", f"now-{number}", priority=number)
        celery.send("work", f"later-{number}", countdown=60)
    celery.send_all("work", [f"batch-{number}" for number in range(50)])
    assert celery.stats().ready == 55
    assert consumers(server, celery.prefix) == set()


def test_eight_workers_that_start_at_once_all_consume(fresh: Callable[..., NatsServer], celery: CeleryRig,
                                                      ledger: Ledger) -> None:
    """Row 141: on an empty server, where each would make the streams and the consumer."""
    server = fresh()
    celery.use(server.url())
    workers = [celery.worker(f"w{number}", start=False, pool="solo", concurrency=1, options=QUICK)
               for number in range(8)]
    celery.start(*workers)
    wait_until(lambda: len(celery.engine.inspector().workers()) == 8, SOON, "all are known")
    for number in range(8):
        celery.send("hold", f"job-{number}")
    ledger.wait("start", 8, timeout=SOON)
    assert {line.worker for line in ledger.lines("start")} == {worker.name for worker in workers}
    celery.flag("release")
    ledger.wait("end", 8, timeout=SOON)
    assert not [line for worker in workers for line in worker.text().splitlines() if "Traceback" in line]
    celery.finish()


# ---------------------------------------------------------------- publishing

def test_a_body_over_the_servers_limit_costs_itself_alone(fresh: Callable[..., NatsServer], celery: CeleryRig) -> None:
    """Row 140: the server would end the connection. The error names both sizes; nothing is sent, and the connection
    stays."""
    server = fresh(max_payload=100_000)
    celery.use(server.url())
    with pytest.raises(MessageTooLarge, match=r"message of 20\d{4} bytes.*max_payload \(100000"):
        celery.app.tasks["work"].delay("large", 0, "x" * 200_000)
    with pytest.raises(MessageTooLarge, match="100000"):
        celery.app.tasks["work"].apply_async(("large", 0, "x" * 200_000), countdown=60)
    celery.send("work", "small")
    with Connection(server.url(), transport_options={"global_keyprefix": celery.prefix}) as connection:
        producer = Producer(connection.channel())
        producer.publish({"small": 1}, routing_key="celery")
        before = connects(server)
        with pytest.raises(MessageTooLarge):
            producer.publish({"large": "x" * 200_000}, routing_key="celery")
        producer.publish({"small": 2}, routing_key="celery")
        assert connects(server) == before
    stats = celery.stats()
    assert (stats.ready, stats.delayed) == (3, 0)


def test_a_publish_without_a_connection_is_stored_once_or_raises(server: NatsServer, celery: CeleryRig,
                                                                 proxy: Proxy) -> None:
    """Rows 142, 143: eight threads publish while the link is cut again and again, sometimes for longer than a publish
    waits."""
    celery.use(server.url(port=proxy.port), publish_timeout=0.5)
    celery.send("work", "first")
    over, raised = threading.Event(), Counter[str]()

    def publish(thread: int) -> None:
        for number in range(100_000):
            if over.is_set():
                return
            try:
                celery.app.tasks["work"].apply_async((f"{thread}-{number}",), retry=False)
            except OperationalError:
                raised[f"{thread}-{number}"] += 1
            else:
                celery.ledger.published(f"{thread}-{number}", 0.0)

    with ThreadPoolExecutor(8) as threads:
        for thread in range(8):
            threads.submit(publish, thread)
        try:
            for away in (0.0, 0.2, 1.5, 0.0, 1.0):
                seen = len(celery.ledger.ids("published"))
                wait_until(lambda seen=seen: len(celery.ledger.ids("published")) > seen + 30, 20, "some more")
                proxy.refuse()
                proxy.reset()
                time.sleep(away)
                proxy.refuse(False)
        finally:
            over.set()
    found: Counter[str] = Counter()
    consumer = celery.engine.consume(["celery"], no_ack=True)
    while got := consumer.fetch(500):
        found.update(str(delivery.message.body).split('"')[1] for delivery in got)
    consumer.close()
    assert [name for name, count in found.items() if count > 1] == []
    assert celery.ledger.ids("published") - found.keys() == set()
    assert found.keys() - celery.ledger.ids("published") <= raised.keys()
    assert raised


def test_a_message_after_a_pause_is_there_at_once(server: NatsServer, celery: CeleryRig, ledger: Ledger) -> None:
    """Row 147: no pull request is left over that makes a later message wait; p99 of 200, one after the other."""
    celery.use(server.url())
    celery.worker(pool="threads", concurrency=1, options=QUICK)
    celery.send("work", "warm")
    ledger.wait_ids("end", ["warm"], SOON)
    late = []
    for number in range(200):
        time.sleep(0.02 if number % 20 else 0.5)
        sent = time.time()
        celery.send("work", f"job-{number}")
        ledger.wait_ids("end", [f"job-{number}"], SOON)
        late.append(ledger.starts(f"job-{number}")[0].at - sent)
    assert sorted(late)[197] < 0.1, sorted(late)[-5:]
    celery.finish()
