"""When this process looks for the dead, and the subscription that is its own proof of life.

A look is made for all: the script tells every worker of it on their common channel, and whoever hears that puts its own
look off. So a fleet looks as often as a single worker would. Who hears nothing, because the looker died or because the
own link is dead without knowing it, looks itself.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from ...errors import StoreConnectionError, StoreError
from .commands import Commands
from .resp import pack

if TYPE_CHECKING:
    from .engine import RedisStreamsEngine

#: seconds between two looks of a fleet
LOOK = 2.4
#: seconds between the two looks that prove a death
PROOF = 2.0
#: longest time between two looks of one worker: each is a sign of life. A lone worker looks no more often
RENEW = 10.0
#: what keeps workers from looking in the same moment: first is who has not looked for longest
SPREAD, CHANCE = 0.05, 0.01

#: what a look tells the others: nobody missed, or somebody whose death the next look may prove
ALL_WELL, SUSPECT = b"all well", b"suspect"


class Lookout:
    """For the keeper's thread alone."""

    def __init__(self, engine: RedisStreamsEngine) -> None:
        self._engine = engine
        share = engine.settings.visibility_timeout / 3
        self._look, self._proof, self._renew = min(LOOK, share), min(PROOF, share), min(RENEW, share)
        # its opening may hang, and signs of life wait for it
        self._link = engine.make_link(min(1.0, share / 2))
        self._name = ""
        self._retry_at = 0.0
        self._next_look = 0.0
        self._renew_by = 0.0

    def fileno(self) -> int:
        return self._link.fileno()

    def due(self) -> float:
        """Monotonic time of the next look or try to subscribe."""
        return self._next_look if self._link.is_open else min(self._next_look, self._retry_at)

    def wants_look(self, now: float) -> bool:
        """Whether it is time; the next one then is counted from now on."""
        if now < self._next_look:
            return False
        self._renew_by = now + self._renew
        self._next_look = min(self._renew_by, now + self._look)
        return True

    def look_soon(self) -> None:
        self._next_look = 0.0

    def alone(self) -> None:
        """There is nobody else to see or to be seen by."""
        self._next_look = self._renew_by

    def unheard(self) -> None:
        """The server does not have the subscription any more."""
        self._link.close()

    def listen(self) -> None:
        """Read what others tell. After a lost connection the sign of life comes at once: the subscription was it."""
        if not self._link.is_open or self._name != self._engine.holder.name:
            return
        try:
            for reply in self._link.poll():
                self._heard(reply[2] if isinstance(reply, list) else b"")
        except StoreConnectionError:
            self.look_soon()

    def _heard(self, told: bytes) -> None:
        now = time.monotonic()
        turn = SPREAD * max(0.0, self._renew_by - now) / self._renew + random.uniform(0.0, CHANCE)
        pause = turn + (self._proof if told == SUSPECT else self._look)
        planned = now + pause if told in (ALL_WELL, SUSPECT) else min(self._next_look, now + pause)
        self._next_look = min(self._renew_by, planned)

    def show_life(self, now: float) -> None:
        """Subscribe where that is needed. While it is not possible the lease alone shows life, and is renewed more
        often than a death is proved."""
        name, keys = self._engine.holder.name, self._engine.keys
        if now < self._retry_at or self._link.is_open and self._name == name:
            return
        try:
            self._link.close()
            self._link.open()
            self._link.send(pack("SUBSCRIBE", keys.alive(name), keys.watch))
            for _ in range(2):
                Commands.check(self._link.read())
            self._name = name
        except (StoreConnectionError, StoreError) as error:
            now = time.monotonic()
            self._retry_at = now + (5.0 if isinstance(error, StoreError) else 0.2)
            self._next_look = min(self._next_look, now + self._proof / 4)
            self._engine.chores.report(f"the keeper cannot subscribe to its channel now: {error}")

    def close(self) -> None:
        self._link.close()

    def abandon(self) -> None:
        self._link.abandon()
