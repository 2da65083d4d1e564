"""The rules of the seam, kept by the Redis Streams engine on a cluster of three masters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from streambroker.testing.conformance.kit import Engines
from streambroker.testing.conformance.real import RealEngines
from streambroker.testing.conformance.suite import *  # noqa: F403
from streambroker.testing.rediscluster import RedisCluster

pytestmark = pytest.mark.only_on("redis", "a cluster is Redis'")


@pytest.fixture(scope="module")
def cluster(kind: str) -> Iterator[RedisCluster]:
    with RedisCluster(kind, aof=False) as cluster:
        yield cluster


@pytest.fixture
def engines(cluster: RedisCluster) -> Iterator[Engines]:
    made = RealEngines(cluster.url())
    yield made
    made.close()
