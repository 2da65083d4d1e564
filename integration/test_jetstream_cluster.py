"""Three nodes, three copies: the leader dies again and again under load."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from streambroker.connection import connect
from streambroker.errors import Closed, StoreConnectionError
from streambroker.message import Message
from streambroker.testing.natsserver import NatsCluster
from streambroker.testing.servers import wait_until

QUEUE = "cluster"


@pytest.fixture
def cluster() -> Iterator[NatsCluster]:
    with NatsCluster() as cluster:
        yield cluster


class Load:
    """A producer of 100 messages a second and a consumer, each with an engine of its own, and what both saw."""

    def __init__(self, url: str, prefix: str) -> None:
        options = {"prefix": prefix, "replicas": 3, "publish_timeout": 20.0, "reconnect_timeout": 30.0}
        self.producer, self.worker = connect(url, **options), connect(url, **options)
        self.confirmed: list[str] = []
        self.received: Counter[str] = Counter()
        self.longest = 0.0
        self.refused = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._publish, self._consume)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float) -> None:
        """End the producer, and the consumer when everything has come."""
        self._stop.set()
        self._threads[0].join(30)
        try:
            wait_until(lambda: set(self.confirmed) <= self.received.keys(), timeout, "everything confirmed has come")
        finally:
            self.worker.close()
            self._threads[1].join(20)
            self.producer.close()

    def _publish(self) -> None:
        number = 0
        while not self._stop.is_set():
            start = time.monotonic()
            try:
                self.producer.publish(QUEUE, [Message(str(number).encode())])
                self.confirmed.append(str(number))
            except StoreConnectionError:
                self.refused += 1
            number += 1
            taken = time.monotonic() - start
            self.longest = max(self.longest, taken)
            self._stop.wait(max(0.0, 0.01 - taken))

    def _consume(self) -> None:
        consumer = self.worker.consume([QUEUE])
        while True:
            try:
                for delivery in consumer.receive(1.0, 20):
                    self.received[delivery.message.body.decode()] += 1
                    consumer.ack(delivery)
            except Closed:
                return
            except StoreConnectionError:
                continue


def kill_leaders(cluster: NatsCluster, load: Load, stream: str, kills: int) -> None:
    load.start()
    wait_until(lambda: len(load.received) > 100, 30, "the first messages")
    for _ in range(kills):
        leader = cluster.leader(stream)
        before = len(load.received)
        leader.kill()
        wait_until(lambda before=before: len(load.received) > before + 50, 15, "work goes on without the leader")
        leader.start()
        wait_until(lambda: all(made["cluster"].get("replicas") and not any(
            replica.get("offline") for replica in made["cluster"]["replicas"])
            for server in cluster.servers for made in server.streams() if "cluster" in made
            and made["cluster"].get("leader") == server.name), 30, "all copies are back")


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.long)])
@pytest.mark.timeout(400)
def test_the_leader_is_killed_again_and_again(cluster: NatsCluster, prefix: str, kills: int) -> None:
    load = Load(cluster.url(), prefix)
    try:
        kill_leaders(cluster, load, prefix, kills)
    finally:
        load.stop(30)
    assert not set(load.confirmed) - load.received.keys()
    assert load.longest < 10
    assert load.refused == 0
    doubled = [number for number, count in load.received.items() if count > 1]
    # acks on their way to a node that was killed
    assert len(doubled) <= 20 * kills
