"""What happens when, decided by a seed before anything starts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STORE = "store"
#: lane -> what may happen there, with its share
SHARES: Mapping[str, Mapping[str, int]] = {
    # lives from the first minute to the last, so that its memory tells
    "veteran": {"cut": 5, "hang": 1},
    "worker": {"kill": 4, "deploy": 4, "cut": 4, "freeze": 1, "hang": 1},
    "producer": {"cut": 1},
    STORE: {"crash": 1, "restart": 1},
}
#: lane -> shortest and longest seconds from one thing to the next
_PAUSES = {"veteran": (12.0, 30.0), "worker": (8.0, 24.0), "producer": (15.0, 40.0), STORE: (20.0, 45.0)}


@dataclass(frozen=True)
class Event:
    """`at`: seconds from the start, or later when what comes before it in its lane takes longer. `seconds`: how long it
    lasts; a cut of 0 is over at once, others refuse connections meanwhile."""

    at: float
    target: str
    what: str
    seconds: float = 0.0


def make_plan(seed: int, minutes: float, lanes: Mapping[str, str], lease: float) -> list[Event]:
    """`lanes` is target -> lane; for the same arguments the same plan."""
    events = [event for target, lane in lanes.items()
              for event in _lane(random.Random(f"{target}{seed}"), minutes * 60, target, lane, lease)]
    return sorted(events, key=lambda event: event.at)


def _lane(chance: random.Random, length: float, target: str, lane: str, lease: float) -> Sequence[Event]:
    events: list[Event] = []
    at = chance.uniform(*_PAUSES[lane]) / 2
    bag: list[str] = []
    while at < length:
        if not bag:  # each kind comes in every run that is long enough
            bag = [what for what, share in SHARES[lane].items() for _ in range(share)]
            chance.shuffle(bag)
        what = bag.pop()
        seconds = 0.0
        if what == "cut":
            seconds = chance.choice((0.0, 0.0, chance.uniform(0.5, 6.0)))
        elif what in ("freeze", "hang"):
            seconds = lease + chance.uniform(2.0, 5.0)
        elif what in ("crash", "restart"):
            seconds = chance.uniform(0.0, 4.0)
        events.append(Event(round(at, 1), target, what, round(seconds, 1)))
        at += seconds + chance.uniform(*_PAUSES[lane])
    return events
