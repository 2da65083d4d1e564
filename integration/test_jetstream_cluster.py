"""Three nodes, three copies: the leader dies again and again under load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from integration.load import Load
from streambroker.connection import connect
from streambroker.message import Message
from streambroker.testing.conformance.kit import drain, until
from streambroker.testing.natsserver import NatsCluster
from streambroker.testing.servers import wait_until

QUEUE = "cluster"


@pytest.fixture
def cluster() -> Iterator[NatsCluster]:
    with NatsCluster() as cluster:
        yield cluster


def kill_leaders(cluster: NatsCluster, load: Load, stream: str, kills: int) -> None:
    for _ in range(kills):
        leader = cluster.leader(stream)
        leader.kill()
        load.progress(50, 15)
        leader.start()
        wait_until(lambda: all(made["cluster"].get("replicas") and not any(
            replica.get("offline") for replica in made["cluster"]["replicas"])
            for server in cluster.servers for made in server.streams() if "cluster" in made
            and made["cluster"].get("leader") == server.name), 30, "all copies are back")


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.long)])
@pytest.mark.timeout(400)
def test_the_leader_is_killed_again_and_again(cluster: NatsCluster, prefix: str, kills: int) -> None:
    with Load(cluster.url(), prefix, [QUEUE], replicas=3) as load:
        kill_leaders(cluster, load, prefix, kills)
    assert not load.missing()
    assert load.longest < 10
    assert load.refused == 0
    # acks on their way to a node that was killed
    assert len(load.doubled()) <= 20 * kills


def test_what_has_fewer_copies_than_asked_for_is_told_and_works(cluster: NatsCluster, prefix: str,
                                                               caplog: pytest.LogCaptureFixture) -> None:
    """More of them stop a stream for a while: that is begun by its operator."""
    for replicas, body in ((1, b"before"), (5, b"after")):
        with closing(connect(cluster.url(), global_keyprefix=prefix, replicas=replicas)) as engine:
            engine.publish(QUEUE, [Message(body)])
            assert cluster.servers[0].api(f"STREAM.INFO.{prefix}")["config"]["num_replicas"] == 1
            consumer = engine.consume([QUEUE])
            delivery, = drain(consumer, 1)
            consumer.dead_letter(delivery, "because")
            until(lambda body=body, engine=engine: body in [
                each.message.body for each in engine.inspector().dead(QUEUE)])
    assert f"stream {prefix} has 1 copies, the option replicas says 5" in caplog.text
