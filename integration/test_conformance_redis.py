"""The rules of the seam, kept by the Redis Streams engine on every server that is here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from streambroker.testing.conformance.kit import Engines
from streambroker.testing.conformance.real import RealEngines
from streambroker.testing.conformance.suite import *  # noqa: F403
from streambroker.testing.servers import RedisServer, available_kinds


@pytest.fixture(scope="module", params=available_kinds())
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with RedisServer(request.param, aof=False) as running:
        yield running


@pytest.fixture
def engines(server: RedisServer) -> Iterator[Engines]:
    made = RealEngines(server.url())
    yield made
    made.close()
