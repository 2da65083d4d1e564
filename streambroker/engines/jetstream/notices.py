"""What the log says of a connection that comes and goes."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

#: a loss is told at once, but for one so soon after another that was told (seconds)
REPEAT = 30.0
#: that one is told when it lasts so long (seconds)
LASTS = 3.0


class Notices:
    """In the loop's thread only."""

    def __init__(self) -> None:
        self._told = float("-inf")
        #: the present loss, as long as nothing is said of it, since when, and how many there were before it
        self._unsaid = ""
        self._since = 0.0
        self._before = 0

    def lost(self, text: str) -> None:
        self._unsaid, self._since = text, time.monotonic()
        if self._since - self._told >= REPEAT:
            self._say()

    def away(self) -> None:
        """No server takes us now."""
        if self._unsaid and time.monotonic() - self._since >= LASTS:
            self._say()

    def connected(self, text: str, *, again: bool) -> None:
        if self._unsaid:
            logger.debug("%s; %s", self._unsaid, text)
            self._unsaid = ""
            self._before += 1
        else:
            logger.log(logging.WARNING if again else logging.INFO, "%s%s", text, " again" if again else "")

    def _say(self) -> None:
        more = f" (and {self._before} times since that was said last)" if self._before else ""
        logger.warning("%s; connecting again%s", self._unsaid, more)
        self._unsaid, self._before, self._told = "", 0, time.monotonic()
