"""The examples, run as their READMEs say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from streambroker.embedded import ServerProcess
from streambroker.testing.servers import RedisServer, wait_until

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
ORDERS, REFUSED = 20, 13


@pytest.fixture
def shop(valkey: RedisServer, tmp_path: Path) -> dict[str, str]:
    """The environment of the shop's processes, in databases of its own."""
    return {**os.environ, "SHOP_BROKER": valkey.url(db=14), "SHOP_RESULTS": valkey.url("redis", db=15),
            "SHOP_BOOKS": str(tmp_path / "books"), "SHOP_REVIEW_AFTER": "2"}


@pytest.fixture
def workers(shop: dict[str, str], tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """Two workers, ready."""
    here = EXAMPLES / "celery_redis"
    started = []
    for name in ("one", "two"):
        log = tmp_path / f"{name}.log"
        started.append(ServerProcess(
            [sys.executable, "-m", "celery", "--workdir", here, "-A", "app", "worker", "--concurrency", "2",
             "--hostname", f"{name}@%h", "--loglevel", "INFO"],
            log=log, ready=lambda log=log: " ready." in log.read_text(), env=shop))
    try:
        for worker in started:
            worker.start(40)
        yield started
    finally:
        for worker in started:
            worker.stop()


def books(shop: dict[str, str], kind: str) -> set[int]:
    folder = Path(shop["SHOP_BOOKS"]) / kind
    return {int(path.name) for path in folder.iterdir()} if folder.exists() else set()


def kill_tree(pid: int) -> None:
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        process.kill()


def streambroker(shop: dict[str, str], *argv: str) -> str:
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [sys.executable, "-m", "streambroker", *argv, "--url", shop["SHOP_BROKER"]], capture_output=True, text=True,
        timeout=30, check=True)
    return done.stdout


def test_celery_redis_ships_all_orders_though_a_worker_is_killed(
        shop: dict[str, str], workers: Sequence[ServerProcess]) -> None:
    places = subprocess.Popen([sys.executable, str(EXAMPLES / "celery_redis" / "place_orders.py"), str(ORDERS)],
                              env=shop, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(books(shop, "charged")) >= 4, 40, "some orders are charged")
    kill_tree(workers[0].pid)
    out, err = places.communicate(timeout=100)
    assert places.returncode == 0, err
    assert f"shipped {ORDERS - 1} orders; refused cards: [{REFUSED}]" in out
    good = set(range(1, ORDERS + 1)) - {REFUSED}
    assert books(shop, "charged") == books(shop, "shipped") == good
    assert books(shop, "timed-out") == {order for order in good if order % 5 == 0}
    wait_until(lambda: books(shop, "asked") == good, 20, "all reviews are asked for")
    [dead] = json.loads(streambroker(shop, "dead", "ls", "--json"))
    assert dead["type"] == "app.charge"
    assert dead["reason"]
    assert f"[{REFUSED}]" in streambroker(shop, "dead", "show", "-Q", "celery", dead["id"])
