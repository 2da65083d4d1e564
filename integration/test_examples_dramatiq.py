"""Dramatiq's examples, run as their READMEs say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from streambroker.embedded import ServerProcess
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import RedisServer, wait_until

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
Start = Callable[[str, dict[str, str]], ServerProcess]


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Start]:
    """`workers(example, environment)` starts two worker processes there."""
    started: list[ServerProcess] = []

    def start(example: str, env: dict[str, str]) -> ServerProcess:
        log = tmp_path / f"{len(started)}.log"
        process = ServerProcess(
            [sys.executable, "-m", "dramatiq", "app:broker", "--path", str(EXAMPLES / example), "--processes", "2",
             "--threads", "2"], log=log, ready=lambda: log.read_text().count("ready for action") == 2, env=env)
        started.append(process)
        process.start(40)
        return process

    yield start
    for process in started:
        process.stop()


def kill_tree(pid: int) -> None:
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        process.kill()


def script(example: str, name: str, *argv: str, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(EXAMPLES / example / name), *argv], env=env, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def dead_letters(url: str) -> Any:
    done = subprocess.run([sys.executable, "-m", "streambroker", "dead", "ls", "--json", "--url", url],
                          capture_output=True, text=True, timeout=30, check=True)
    return json.loads(done.stdout)


def names(folder: Path) -> Sequence[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_dramatiq_redis_ships_all_orders_though_the_workers_are_killed(
        workers: Start, valkey: RedisServer, tmp_path: Path) -> None:
    books = tmp_path / "books"
    env = {**os.environ, "SHOP_BROKER": valkey.url("redis", db=13), "SHOP_BOOKS": str(books),
           "SHOP_REVIEW_AFTER": "1000"}
    doomed = workers("dramatiq_redis", env)
    workers("dramatiq_redis", env)
    places = script("dramatiq_redis", "place_orders.py", "20", env=env)
    wait_until(lambda: len(names(books / "charged")) >= 3, 40, "some orders are charged")
    kill_tree(doomed.pid)
    out, err = places.communicate(timeout=100)
    assert places.returncode == 0, err
    assert "shipped 19 orders; refused cards: 1" in out
    good = sorted(str(order) for order in range(1, 21) if order != 13)
    assert names(books / "charged") == names(books / "shipped") == names(books / "asked") == good
    [dead] = dead_letters(valkey.url(db=13))
    assert (dead["type"], dead["reason"]) == ("charge", "CardRefused: order 13: the card is refused")


def test_dramatiq_jetstream_makes_all_thumbnails(
        workers: Start, tmp_path: Path) -> None:
    with NatsServer("nats") as server:
        album = tmp_path / "album"
        env = {**os.environ, "PICTURES_BROKER": server.url().replace("jetstream://", "nats://"),
               "PICTURES_ALBUM": str(album)}
        doomed = workers("dramatiq_jetstream", env)
        adds = script("dramatiq_jetstream", "add_pictures.py", "60", env=env)
        wait_until(lambda: "urgent.png.small" in names(album), 40, "the urgent one is made")
        assert "picture-59.png.small" not in names(album)
        workers("dramatiq_jetstream", env)
        kill_tree(doomed.pid)
        out, err = adds.communicate(timeout=100)
        assert adds.returncode == 0, err
        assert "made 61 thumbnails; no pictures: 1" in out
        assert (album / "report").read_text().endswith("thumbnails\n")
        [dead] = dead_letters(server.url())
        assert (dead["type"], dead["reason"]) == ("thumbnail", "NoPicture: notes.txt is no picture")
