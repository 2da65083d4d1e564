"""The rules of the seam, kept by the JetStream engine on every nats-server that is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from streambroker.testing.conformance.kit import Engines
from streambroker.testing.conformance.real import RealEngines
from streambroker.testing.conformance.suite import *  # noqa: F403
from streambroker.testing.natsserver import NatsServer


@pytest.fixture
def engines(every_nats_kind: str, nats_servers: Callable[[str], NatsServer]) -> Iterator[Engines]:
    made = RealEngines(nats_servers(every_nats_kind).url())
    yield made
    made.close()
