"""What a worker or a producer costs the store: connections, requests while idle; and that a store which is gone stops
no worker from ending and no publisher for longer than was asked for."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from kombu.exceptions import OperationalError

from integration.ledger import Ledger
from integration.rig import CeleryRig
from integration.stores import Server, connects, requests
from integration.worker import stop_all
from streambroker.testing.faults import Proxy
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import wait_until

POOLS = ["prefork", "threads", "solo", "gevent", "eventlet"]


def links_of(server: Server, pid: int) -> int:
    """Connections of one process to the server."""
    return sum(link.raddr and link.raddr.port == server.port and link.status == psutil.CONN_ESTABLISHED
               for link in psutil.Process(pid).net_connections())


# ---------------------------------------------------------------- connections

def test_a_process_has_few_connections(fresh: Callable[..., Server], celery: CeleryRig, ledger: Ledger) -> None:
    """Rows 111, 112: six in a worker with mingle, gossip, events and remote control, one in each of its processes that
    publishes, a plain one beside it on a nats-server; also after many remote commands."""
    server = fresh()
    celery.use(server.url())
    worker = celery.worker(concurrency=4, options=["-E"])
    for number in range(8):
        celery.send("publishing", f"parent-{number}", [f"child-{number}"])
    ledger.wait("end", 16, 20)
    for _ in range(20):
        assert celery.app.control.ping(timeout=5, limit=1)
    counts = {pid: links_of(server, pid) for pid in worker.pids()}
    assert counts.pop(worker.pid) <= 6
    assert all(count <= 1 + isinstance(server, NatsServer) for count in counts.values())
    worker.stop()


def test_publishing_from_threads_keeps_its_connections(fresh: Callable[..., Server], celery: CeleryRig,
                                                       ledger: Ledger) -> None:
    """Rows 113, 114: as in a web server, 200 publishes and some results from eight threads."""
    server = fresh()
    celery.use(server.url(), backend=server.result_url())
    before = connects(server)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: celery.send("work", f"from-thread-{number}"), range(200)))
        links, opened = links_of(server, psutil.Process().pid), connects(server)
        list(threads.map(lambda number: celery.send("work", f"again-{number}"), range(200)))
        assert connects(server) - opened <= 1  # the one that asks
        assert links_of(server, psutil.Process().pid) == links <= 6 + 8  # Celery's result store has its own
    celery.wait_stats(ready=400)
    # Kombu looks once for each of its pooled connections whether the store is there
    assert opened - before <= 5 + 2 * 8 + 8


@pytest.mark.parametrize(("seconds", "rare"), [(15, 4), pytest.param(60, 0, marks=pytest.mark.long)])
def test_idle_workers_ask_for_little(fresh: Callable[..., Server], tmp_path: Path, seconds: int, rare: int) -> None:
    """Rows 56, 116: at most one command a second and worker, Celery's own heartbeat of one in two seconds included, and
    no reconnects; a lone worker and two that watch over each other. What comes twice a minute may fall into a short
    look: `rare`. (On a nats-server up to three plain messages: they ask each other whether they live.)"""
    servers, rigs = [fresh(), fresh()], []
    try:
        for count, server in enumerate(servers, start=1):
            (tmp_path / str(count)).mkdir()
            rig = CeleryRig(tmp_path / str(count), Ledger(tmp_path / str(count) / "ledger.jsonl"), "idle")
            rigs.append(rig)
            rig.use(server.url())
            rig.start(*(rig.worker(f"w{number}", start=False, concurrency=1) for number in range(count)))
            rig.send("work", "first")
            rig.ledger.wait("end", 1, 10)
        time.sleep(21)  # what follows a start: a search for lost answers
        opened = [connects(server) for server in servers]
        with ThreadPoolExecutor() as threads:
            sent = list(threads.map(lambda server: requests(server, seconds), servers))
        own = 0 if isinstance(servers[0], NatsServer) else 3
        assert [connects(server) - before for server, before in zip(servers, opened, strict=True)] == [own, own]
        for count, each in enumerate(sent, start=1):
            assert each <= seconds * count * (3 if isinstance(servers[0], NatsServer) else 1) + rare
        for rig in rigs:
            lines = [line for worker in rig.workers for line in worker.text().splitlines()]
            assert not [line for line in lines if "WARNING" in line and "Security" not in line]
            rig.finish()
    finally:
        for rig in rigs:
            rig.close()


# ---------------------------------------------------------------- a store that is gone

@pytest.mark.parametrize("away", [0.3, 8.0], ids=["just gone", "long gone"])
def test_a_worker_ends_though_its_store_is_gone(fresh: Callable[..., Server], celery: CeleryRig, ledger: Ledger,
                                                away: float) -> None:
    """In every pool, idle and with a task that ends meanwhile."""
    server = fresh()
    celery.use(server.url(), queues=POOLS)
    workers = [celery.worker(pool, start=False, pool=pool, options=["-Q", pool, "-E"]) for pool in POOLS]
    celery.start(*workers)
    for pool in POOLS:
        celery.send("work", f"idle-{pool}", queue=pool)
    ledger.wait("end", len(POOLS), 10)
    for pool in ("prefork", "threads"):
        celery.send("work", f"busy-{pool}", away + 1, queue=pool)
    ledger.wait("start", len(POOLS) + 2, 10)
    server.kill()
    time.sleep(away)
    assert max(stop_all(workers, signal.SIGTERM, timeout=15)) < 12
    assert {"busy-prefork", "busy-threads"} <= ledger.ids("end")


def test_publishing_waits_or_raises_as_configured(fresh: Callable[..., Server], celery: CeleryRig) -> None:
    """A store that is back within `publish_timeout` costs a publisher time only; one that is not is a clear error after
    that time, and nothing is stored twice or later."""
    server = fresh()
    celery.use(server.url(), publish_timeout=5)
    celery.send("work", "before")
    server.stop()
    late = threading.Timer(1.5, server.start)
    late.start()
    began = time.monotonic()
    celery.send("work", "patient")
    assert 1 < time.monotonic() - began < 5
    late.join()
    celery.wait_stats(ready=2)

    celery.use(server.url(), publish_timeout=0.5)
    celery.send("work", "again")
    server.stop()
    began = time.monotonic()
    with pytest.raises(OperationalError,
                       match=r"Connection refused|cannot be reached|closed the connection|no connection to"):
        celery.app.tasks["work"].apply_async(("refused",), retry=False)
    assert time.monotonic() - began < 2
    began = time.monotonic()
    with pytest.raises(OperationalError):
        celery.app.tasks["work"].apply_async(("refused",), retry_policy={"max_retries": 2, "interval_start": 0.1})
    assert time.monotonic() - began < 5
    server.start()
    celery.wait_stats(ready=3)


def test_a_web_process_publishes_over_a_link_that_was_cut(server: Server, celery: CeleryRig, proxy: Proxy) -> None:
    """Row 49: idle past the cut of a balancer, which resets, closes or forgets its connections."""
    celery.use(server.url(port=proxy.port), socket_timeout=2)
    celery.send("work", "first")
    for number, cut in enumerate((proxy.reset, proxy.drop, proxy.freeze)):
        assert cut() > 0
        began = time.monotonic()
        celery.send("work", f"after-{number}")
        assert time.monotonic() - began < 3
    proxy.release()
    celery.wait_stats(ready=4)
    wait_until(lambda: celery.stats().ready == 4, 1, "still four")
