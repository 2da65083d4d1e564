"""Last-chance messages that are out, and what their books say of them: who is convicted when the process dies.

A process dies with all that it has, so one such message at a time is out within its time, of all queues together, and
one that was lost in company has the process for itself.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import StoreConnectionError
from ...message import Delivery
from .holder import Key

if TYPE_CHECKING:
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)

#: how long the server may take (seconds)
PATIENCE = 1.0


@dataclass(slots=True)
class Trial:
    """Until its time is over (monotonic) the process gets no other such message, and nothing at all when it is
    `strict`. `alone`: what the book says about its company."""

    delivery: Delivery
    strict: bool
    until: float
    alone: bool


class Trials:
    """Of one engine and process. Changed in single steps, from any thread."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine
        self._out: dict[Key, Trial] = {}
        #: until when the process empties itself for one (monotonic)
        self.emptying: float | None = None
        self._long: Key | None = None
        self._said = True

    def __bool__(self) -> bool:
        return bool(self._out)

    def within(self, now: float) -> Trial | None:
        """The one whose time is not over."""
        return next((trial for trial in list(self._out.values()) if trial.until > now), None)

    def lapse(self) -> None:
        """It did so in vain."""
        self.emptying = None
        self._long = next(iter(list(self._engine.holder.handed)), None)

    @property
    def lapsed(self) -> bool:
        """Whether what it emptied itself from in vain is still here: that is not waited for again, or many suspects
        behind it would take as many times as long."""
        return self._long is not None and self._long in self._engine.holder.handed

    def say(self) -> None:
        """Returns when the server has what was noted: a process may die as soon as it gets the messages. Blocks; not
        for the link's thread."""
        if not self._said:
            self._said = True
            try:
                self._engine.link.flush(PATIENCE)
            except StoreConnectionError as error:
                logger.debug("the books of messages on trial may be late: %s", error)

    def begin(self, suspect: Delivery, *, strict: bool, alone: bool, until: float) -> None:
        """It goes out. Others that are still out have lived through their time: they are not the ones."""
        engine, place = self._engine, suspect.place
        for trial in list(self._out.values()):
            engine.link.post([engine.books.frame(trial.delivery.place, trial="")])
        self._out.clear()
        self._out[place.key] = Trial(suspect, strict, until, alone)
        self._said = False
        engine.link.post([engine.books.frame(place, trial=engine.holder.name, at=place.raw, alone=alone)])

    def joined(self) -> None:
        """Something may be handed out beside them: their books tell before that happens."""
        now = time.monotonic()
        for trial in list(self._out.values()):
            if not trial.strict or trial.until <= now:
                self._note(trial, alone=False)

    def let_go(self, delivery: Delivery) -> None:
        """It is with no consumer any more."""
        if self._out:
            self._out.pop(delivery.place.key, None)
            left = list(self._engine.holder.handed)
            trial = self._out.get(left[0]) if len(left) == 1 else None
            if trial is not None:
                self._note(trial, alone=True)

    def _note(self, trial: Trial, *, alone: bool) -> None:
        if trial.alone is not alone:
            trial.alone = alone
            self._said = False
            self._engine.link.post([self._engine.books.frame(trial.delivery.place, alone=alone)])
