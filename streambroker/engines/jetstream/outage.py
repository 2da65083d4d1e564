"""Telling one who waits that the link is broken, when mending it takes too long."""

from __future__ import annotations

import time

from ...errors import StoreConnectionError
from ...settings import Settings
from .link import Link


class Outage:
    """For one who looks again and again."""

    def __init__(self, link: Link, settings: Settings) -> None:
        self._link = link
        self._settings = settings
        self._since: float | None = None

    def look(self) -> None:
        """Raises StoreConnectionError when the link is broken for `reconnect_timeout` seconds, and then again after as
        many."""
        if self._link.connected:
            self._since = None
            return
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._since >= self._settings.reconnect_timeout:
            self._since = None
            error = self._link.failure()
            raise StoreConnectionError(f"the store cannot be reached: {error}") from error

    def due(self) -> float | None:
        """Seconds until `look` may raise; None while all is well."""
        if self._since is None:
            return None
        return max(0.0, self._since + self._settings.reconnect_timeout - time.monotonic())
