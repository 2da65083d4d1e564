"""The rules of the seam, kept by the memory engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from streambroker.testing.conformance.kit import Engines
from streambroker.testing.conformance.memory import MemoryEngines
from streambroker.testing.conformance.suite import *  # noqa: F403


@pytest.fixture
def engines() -> Iterator[Engines]:
    made = MemoryEngines()
    yield made
    made.close()
