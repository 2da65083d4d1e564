"""A process is killed between any two steps of what it does: nothing is lost, nothing is there twice.

Each operation of an engine is begun again and again in a process of its own, which is killed after its first, second,
third request to the store, until it has got to its end. Then somebody else works the queue off.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from integration.base import wait_at_base
from integration.operations import BODIES, OPERATIONS, OTHER, QUEUE, Operation
from integration.stores import Server
from integration.worker import ROOT
from streambroker import connect
from streambroker.testing import faults
from streambroker.testing.conformance.kit import name
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.steps import Steps, nats_requests, redis_requests

LEASE = 1.0
#: killed at so many places at a time
SIDE_BY_SIDE = 4
#: what moves a message in several steps; the others only in the long run
MOVES = {"Bury", "Replay", "Stop"}


@dataclass(frozen=True)
class End:
    """How a process ended: what it was about to ask (empty: it had got to its end), and what there was afterwards."""

    place: bytes
    found: Counter[str]
    counts: list[int]


def kill_after(operation: str, server: Server, requests: int) -> End:
    kind = OPERATIONS[operation]
    prefix = name("p")
    options = {"prefix": prefix, "visibility_timeout": LEASE, **kind.options}
    preparing = connect(server.url(), **options)
    kind(preparing).before()
    preparing.close()
    with Steps(server.port, nats_requests if isinstance(server, NatsServer) else redis_requests) as steps:
        process = subprocess.Popen(
            [sys.executable, "-m", "integration.operations", operation, str(server.url(port=steps.port)),
             json.dumps(options)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            steps.allow(requests)
            process.stdin.write("go\n")
            process.stdin.flush()
            place = wait(process, steps)
        finally:
            process.kill()
            process.communicate()
        steps.forget()
    found, counts = work_off(server, options, kind)
    wait_at_base(server, prefix, 10)
    return End(place, found, counts)


def wait(process: subprocess.Popen[str], steps: Steps) -> bytes:
    """Until it is kept back, or done."""
    assert process.stdout is not None
    with ThreadPoolExecutor(1) as reading:
        done = reading.submit(process.stdout.readline)
        while not steps.stopped:
            if done.done():
                assert done.result() == "done\n", "the operation failed by itself"
                return b""
            time.sleep(0.005)
        faults.done["process killed"] += 1
        process.kill()
    return steps.wait_stopped()


def work_off(server: Server, options: dict[str, Any], kind: type[Operation]) -> tuple[Counter[str], list[int]]:
    """What another process finds, in the queues and in the dead letters, which are empty then."""
    engine = connect(server.url(), **{**options, "delivery_limit": None})
    found: Counter[str] = Counter()
    counts = []
    try:
        kind(engine).repeat()
        inspector = engine.inspector()
        consumer = engine.consume([QUEUE, OTHER])
        deadline = time.monotonic() + LEASE + 15
        while True:
            for delivery in consumer.receive(0.3, 10):
                found[delivery.message.body.decode()] += 1
                counts.append(delivery.count)
                consumer.ack(delivery)
            rows = [inspector.stats(queue) for queue in (QUEUE, OTHER)]
            workers = inspector.workers()
            # nobody but us: what the dead one had is no longer his
            if len(workers) <= 1 and not any(row.ready + row.delayed + row.in_flight for row in rows):
                break
            assert time.monotonic() < deadline, f"still there: {rows}, {workers}"
        letters = list(inspector.dead(QUEUE))
        found.update(letter.message.body.decode() for letter in letters)
        inspector.dead_remove(QUEUE, [letter.id for letter in letters])
    finally:
        engine.close()
    return found, counts


def ends(operation: str, server: Server) -> Iterator[End]:
    """After each step, until it gets to its end."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for first in count(0, SIDE_BY_SIDE):
            places = range(first, first + SIDE_BY_SIDE)
            several = list(pool.map(lambda requests: kill_after(operation, server, requests), places))
            yield from several
            if any(not end.place for end in several):
                return


@pytest.mark.stores
@pytest.mark.timeout(300)
@pytest.mark.parametrize("operation", [
    each if each in MOVES else pytest.param(each, marks=pytest.mark.long) for each in OPERATIONS])
def test_a_kill_between_any_two_steps_loses_and_doubles_nothing(operation, server):
    kind = OPERATIONS[operation]
    several = list(ends(operation, server))
    assert several[0].place, "it does nothing to the store"
    for steps, end in enumerate(several):
        allowed = kind.copies if end.place else kind.done
        assert all(end.found[body] in allowed for body in BODIES), (steps, end)
        assert end.found.keys() <= {*BODIES, "waits"}, (steps, end)
        assert max(end.counts, default=1) <= kind.deliveries, (steps, end)
