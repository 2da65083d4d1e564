"""The rules of the seam, kept by the Redis Streams engine on every server that is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from streambroker.testing.conformance.kit import Engines
from streambroker.testing.conformance.real import RealEngines
from streambroker.testing.conformance.suite import *  # noqa: F403
from streambroker.testing.servers import RedisServer


@pytest.fixture
def engines(every_kind: str, servers: Callable[[str], RedisServer]) -> Iterator[Engines]:
    made = RealEngines(servers(every_kind).url())
    yield made
    made.close()
