"""Asking the server for messages of one or several lanes.

A single lane has a standing request for as many messages as there is room: they come without a round trip. Several
lanes are asked in their order for what is ready now; only when all were found empty each gets a standing request for
one message, and what then comes beyond the room goes back uncounted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...errors import StoreConnectionError, StoreError
from .frames import Reply
from .lane import Lane

if TYPE_CHECKING:
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)

#: a request for what is ready is answered at once; one without an answer for so long is given up (seconds)
PATIENCE = 2.0
#: pauses between tries to make a lost consumer anew
PAUSES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


class Sweep:
    """One round over lanes for what is ready now. `arm`: leave standing requests behind when there is room left."""

    def __init__(self, lanes: list[Lane], number: int, *, arm: bool) -> None:
        self.lanes = lanes
        self.mark = f"n{number}"
        self.arm = arm
        self.index = 0
        self.left = 0
        self.since = time.monotonic()
        self.done = False

    @property
    def lane(self) -> Lane:
        return self.lanes[self.index]


class Pull:
    """The asking half of a consumer. Everything is called under the consumer's lock."""

    def __init__(self, engine: JetStreamEngine, lanes: list[Lane], order: Callable[[], list[Lane]],
                 notify: Callable[[], None]) -> None:
        self._engine = engine
        self._lanes = lanes
        self._order = order
        self._notify = notify
        #: how many more messages the driver has room for
        self.want = 0
        #: a single fetch is under way, which leaves no request behind
        self.single = False
        self.sweep: Sweep | None = None
        self._armed = False
        self._number = 0

    # ------------------------------------------------------------------ asking
    def ask(self) -> None:
        """Bring what is asked for in line with what is wanted."""
        if self.want <= 0 or not self._lanes or self.single:
            return
        if len(self._lanes) == 1 and self.sweep is None:
            lane = self._lanes[0]
            lack = self.want - max(0, lane.outstanding)
            # topped up when half of it is used, so that one request brings several messages
            if lack > 0 and not lane.repairing and (lane.outstanding <= 0 or lack * 2 >= self.want):
                lane.pull(lack)
        elif self.sweep is None and not self._armed:
            self.begin(arm=True)

    def begin(self, *, arm: bool) -> Sweep:
        """Start a sweep in place of the one under way."""
        self._number += 1
        sweep = self.sweep = Sweep(self._order(), self._number, arm=arm)
        self._ask_lane(sweep)
        return sweep

    def _ask_lane(self, sweep: Sweep) -> None:
        while sweep.index < len(sweep.lanes) and self.want > 0:
            sweep.left, sweep.since = self.want, time.monotonic()
            if sweep.lane.repairing or not sweep.lane.pull_now(self.want, sweep.mark):
                sweep.index += 1
                continue
            return
        self._end(sweep)

    def _end(self, sweep: Sweep) -> None:
        sweep.done = True
        if self.sweep is sweep:
            self.sweep = None
        if sweep.arm and self.want > 0:
            self._arm()
        self._notify()

    def _arm(self) -> None:
        if len(self._lanes) == 1:
            self.ask()
            return
        self._armed = True
        for lane in self._lanes:
            if lane.outstanding <= 0 and not lane.repairing:
                lane.pull(1)

    def _next(self, sweep: Sweep) -> None:
        sweep.index += 1
        self._ask_lane(sweep)

    def changed(self) -> None:
        """Other lanes than before."""
        self._armed = False
        if self.sweep is not None:
            self._end(self.sweep)

    # ------------------------------------------------------------------ what came
    def arrived(self, lane: Lane) -> bool:
        """Count a message; False when there is no room for it."""
        lane.heard = time.monotonic()
        self.want -= 1
        if lane.outstanding > 0:
            lane.came += 1
            self._armed = False
        elif self.sweep is not None and self.sweep.lane is lane:
            self.sweep.left -= 1
            if self.sweep.left <= 0:
                # it had all that was asked for; when there is more room meanwhile it may have more
                self._ask_lane(self.sweep)
        return self.want >= 0

    def status(self, lane: Lane, reply: Reply) -> None:
        lane.heard = time.monotonic()
        if reply.status == 100:
            return
        if not reply.subject.endswith(".s"):
            sweep = self.sweep
            if sweep is not None and reply.subject.endswith("." + sweep.mark) and sweep.lane is lane:
                if reply.status in (409, 503) and self._lost(reply):
                    self._repair(lane, reply)
                self._next(sweep)
            return
        pending = (reply.headers or {}).get("Nats-Pending-Messages", "")
        lane.came = min(lane.asked, lane.came + int(pending)) if pending.isdigit() else lane.asked
        if reply.status in (409, 503):
            lane.reset()
            if self._lost(reply):
                self._repair(lane, reply)
            else:
                self._engine.link.call_later(0.2, lambda: self._again(lane))
        else:
            self._again(lane)

    @staticmethod
    def _lost(reply: Reply) -> bool:
        return reply.status == 503 or "Deleted" in reply.description or "Leadership" in reply.description

    def _again(self, lane: Lane) -> None:
        """After a request has expired, though nobody drives the consumer."""
        if len(self._lanes) == 1:
            self.ask()
        elif self._armed and self.want > 0 and lane in self._lanes and lane.outstanding <= 0:
            lane.pull(1)

    # ------------------------------------------------------------------ trouble
    def reconnected(self) -> None:
        """No request has survived."""
        for lane in self._lanes:
            lane.reset()
        self._armed = False
        if self.sweep is not None:
            sweep = self.sweep
            if sweep.arm:
                self.sweep = None
            else:
                self._end(sweep)
        self.ask()

    def look(self, now: float) -> None:
        """Give up what the server has forgotten, now and then."""
        for lane in self._lanes:
            if lane.forgotten(now):
                logger.debug("%s was silent for too long, it is asked again", lane.durable)
                lane.reset()
                self._armed = False
        sweep = self.sweep
        if sweep is not None and now - sweep.since > PATIENCE:
            self._next(sweep)
        self.ask()

    def _repair(self, lane: Lane, reply: Reply) -> None:
        if not lane.repairing:
            lane.repairing = True
            self._engine.link.spawn(self._remake(lane, reply.description or "nobody answers"))

    async def _remake(self, lane: Lane, reason: str) -> None:
        tries = 0
        while lane in self._lanes:
            try:
                await lane.remake()
                break
            except (StoreConnectionError, StoreError) as error:
                if tries > 2:
                    self._engine.chores.report(f"cannot consume {lane.queue!r}: {error}")
                await asyncio.sleep(PAUSES[min(tries, len(PAUSES) - 1)])
                tries += 1
        lane.repairing = False
        # those who have no request there do not notice
        self._engine.claims.durable_made_anew()
        self._engine.tell({"anew": lane.durable})
        if lane in self._lanes:
            if "Leadership" not in reason:
                self._engine.chores.report(f"the consumer of queue {lane.queue!r} was gone ({reason}), made again",
                                           calm=not self._lost_messages(reason))
                self._engine.consumption.steps_changed(lane.queue)
            lane.reset()
            self._armed = False
            self.ask()

    @staticmethod
    def _lost_messages(reason: str) -> bool:
        return "Deleted" in reason
