"""Moments in which two things happen at once."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.stores import Server
from streambroker import connect
from streambroker.engine import Consumer
from streambroker.message import Delivery
from streambroker.testing.conformance.kit import acked, bodies, drain, messages
from streambroker.testing.conformance.mortal import ProcessMortal
from streambroker.testing.servers import RedisServer, wait_until

REDIS = pytest.mark.only_on("redis", "is about what a Redis keeps")


@REDIS
def test_a_bell_that_wakes_a_consumer_which_has_no_place_left_rings_on(server: RedisServer, prefix: str) -> None:
    """One consumer of two queues and one of the second; both queues get a message in the same moment."""
    both = connect(server.url(), prefix=prefix, queue_order_strategy="priority")
    one = connect(server.url(), prefix=prefix)
    for queue in ("first", "second"):
        one.publish(queue, messages("made"))
    busy, idle = both.consume(["first", "second"]), one.consume(["second"])
    acked(busy, drain(busy, 2))
    assert busy.receive(0.2, 1) == []
    assert idle.receive(0.2, 1) == []
    with server.client() as client:
        pipeline = client.pipeline(transaction=True)
        for queue in ("second", "first"):
            pipeline.xadd(f"{prefix}:{{{queue}}}:s:0", {"m": "2:{}now"})
            pipeline.rpush(f"{prefix}:{{{queue}}}:bell", "1")
        pipeline.execute()

    def receive(consumer: Consumer) -> tuple[list[str], float]:
        began = time.monotonic()
        got: list[Delivery] = drain(consumer, 1, 6)
        return [delivery.queue for delivery in got], time.monotonic() - began

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(receive, (busy, idle)))
    assert [queues for queues, _ in results] == [["first"], ["second"]]
    assert max(seconds for _, seconds in results) < 2
    both.close()
    one.close()


def test_all_queues_of_a_process_are_known_though_its_threads_start_at_once(server: Server, prefix: str) -> None:
    """What is not known of a worker is not recovered when it dies."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(20):
            engine = connect(server.url(), prefix=f"{prefix}-{number}")
            barrier = threading.Barrier(8)
            made: list[Consumer] = []

            def start(queue: str) -> None:
                barrier.wait()  # noqa: B023  the threads end before the next turn
                made.append(engine.consume([queue]))  # noqa: B023

            queues = [f"q{letter}" for letter in "abcdefgh"]
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(start, queues))
            worker, = engine.inspector().workers()
            assert sorted(worker.queues) == queues
            engine.close()
    finally:
        sys.setswitchinterval(interval)


@REDIS
def test_a_server_whose_clock_was_put_back_still_finds_the_dead(server: RedisServer, prefix: str) -> None:
    """What the server keeps then lies an hour ahead: the lease of a dead worker, the turn to look, its start."""
    mortal = ProcessMortal(server.url(), {"prefix": prefix, "visibility_timeout": 2})
    engine = connect(server.url(), prefix=prefix, visibility_timeout=2)
    engine.publish("q", messages("a"))
    assert len(mortal.take("q", 1)) == 1
    holder, common, hour = mortal.holder, f"{prefix}:{{@}}:", 3_600_000
    consumer = engine.consume(["q"])
    with server.client() as client:
        wait_until(lambda: client.exists(common + "server"), 5, "somebody has looked")
        mortal.die()
        later = int(client.time()[0]) * 1000 + hour
        client.pexpire(common + "w:" + holder, hour)
        client.set(common + "gate", "x", px=hour)
        client.hset(common + "server", "since", later)
        client.hset(common + "gone", holder, later)
    assert bodies(drain(consumer, 1, 10)) == ["a"]
    engine.close()
