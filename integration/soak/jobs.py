"""What a soak publishes, and what a worker does with it, whatever the framework is."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from integration.ledger import append

VARIABLE = "STREAMBROKER_SOAK"
#: the second one is not for the veteran: what is in it kills
QUEUES = ("soak", "poison")
#: bytes: larger messages are refused by the publisher
LIMIT = 512 << 10
#: bytes of large ones: with more than a pipe holds (64 KiB) a warm shutdown of Celery's prefork pool may hang, over
#: every broker
LARGE = 40 << 10
#: one of so many jobs kills whoever runs it
POISON_EVERY = 300
#: kind of job -> share
_SHARES = {"plain": 60, "delayed": 14, "retried": 10, "prioritised": 11, "large": 3, "oversized": 2}


@dataclass(frozen=True)
class Settings:
    """What a worker or a producer must know. `options` are those of the engine, times in seconds."""

    engine: str
    url: str
    ledger: str
    member: str
    seed: int = 0
    rate: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def read(cls) -> Settings:
        """Those that the parent process has set."""
        return cls(**json.loads(os.environ[VARIABLE]))


@dataclass(frozen=True)
class Job:
    """`delay` and `seconds` (how long it works) are seconds, `padding` bytes; `priority` is a step, 0 first."""

    id: str
    kind: str = "plain"
    queue: str = QUEUES[0]
    seconds: float = 0.0
    delay: float = 0.0
    priority: int = 0
    retries: int = 0
    padding: int = 0


class Again(Exception):
    """The framework is to run the job again after `delay` seconds."""

    def __init__(self, delay: float) -> None:
        super().__init__(delay)
        self.delay = delay


def stream_of_jobs(producer: str, seed: int) -> Iterator[Job]:
    """Without end, the same ones for the same seed."""
    chance = random.Random(f"{producer}{seed}")
    number, poison = 0, chance.randrange(30, POISON_EVERY)
    while True:
        number += 1
        kind = chance.choices([*_SHARES], [*_SHARES.values()])[0]
        if number % POISON_EVERY == poison:
            kind = "poison"
        # most work is short, some lasts long enough to be hit by what happens to its worker
        seconds = round(chance.uniform(0.5, 2.5) if chance.random() < 0.06 else chance.uniform(0.0, 0.12), 3)
        yield Job(
            f"{producer}-{number}-{kind}", kind, QUEUES[kind == "poison"], seconds,
            delay=round(chance.uniform(0.3, 20.0), 3) if kind == "delayed" else 0.0,
            priority=chance.randrange(4) if kind == "prioritised" else 0,
            retries=chance.randint(1, 2) if kind == "retried" else 0,
            padding={"large": LARGE, "oversized": LIMIT * 2}.get(kind, 0))


def perform(settings: Settings, job: str, kind: str, seconds: float, retries: int, attempt: int) -> None:
    """One run of a job. Raises Again while there are retries left; a poison does not return."""
    facts = {"worker": settings.member, "retries": attempt}
    append(settings.ledger, "start", job, **facts)
    time.sleep(seconds)
    if kind == "poison":
        append(settings.ledger, "dying", job, **facts)
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt < retries:
        delay = 1.0 + attempt
        append(settings.ledger, "again", job, due=time.time() + delay, **facts)
        raise Again(delay)
    append(settings.ledger, "end", job, **facts)
