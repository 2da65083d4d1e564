"""Who is convicted when a worker of several queues dies again and again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from integration.stores import Server
from streambroker import connect
from streambroker.testing.conformance.kit import bodies, messages

ROOT = Path(__file__).resolve().parent.parent

#: consumes two queues, dies of a poison, and otherwise finishes what it has after some seconds
WORKER = """
import os, signal, sys, time
from integration.stores import Server
from streambroker import connect
engine = connect(sys.argv[1], prefix=sys.argv[2], visibility_timeout=1, delivery_limit=3)
consumer, got = engine.consume(["first", "second"]), []
end = time.monotonic() + 3.5
while time.monotonic() < end:
    got += consumer.receive(0.1, 10)
    if any(delivery.message.body == b"poison" for delivery in got):
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
for delivery in got:
    consumer.ack(delivery)
engine.close()
"""


@pytest.mark.stores
def test_a_poison_takes_no_neighbour_in_another_queue_with_it(server: Server, prefix: str) -> None:
    engine = connect(server.url(), prefix=prefix, delivery_limit=3)
    engine.publish("first", messages("innocent"))
    engine.publish("second", messages("poison"))
    deaths = 0
    for _ in range(10):
        deaths += subprocess.run([sys.executable, "-c", WORKER, server.url(), prefix], cwd=ROOT).returncode != 0
        if list(engine.inspector().dead("second")):
            break
    assert bodies(engine.inspector().dead("second")) == ["poison"]
    assert bodies(engine.inspector().dead("first")) == []
    assert 3 <= deaths <= 6
    engine.close()
