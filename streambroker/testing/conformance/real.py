"""A real store as engine under test: everything takes its time, and mortals are processes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ...connection import connect
from ...engine import Consumer, Engine
from ...message import Delivery
from .kit import LEASE, MARGIN, Engines, drain, name
from .mortal import ProcessMortal


class RealEngines(Engines):
    """Engines of one URL, under a prefix of their own."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._url = url
        self._options = {"prefix": name("p"), **(options or {})}

    def make(self, **options: Any) -> Engine:
        return connect(self._url, **{**self._options, **options})

    def make_mortal(self, **options: Any) -> ProcessMortal:
        return ProcessMortal(self._url, {**self._options, **options})

    def advance(self, seconds: float) -> None:
        time.sleep(seconds)

    def recovered(self, consumer: Consumer, count: int, lease: float = LEASE) -> list[Delivery]:
        return drain(consumer, count, lease + MARGIN)
