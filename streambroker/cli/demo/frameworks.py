"""The frameworks that the demo can show, and how each of their workers is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

CONCURRENCY = 4


class Framework(NamedTuple):
    """`package` must be there, which the extras bring. `worker` is the command of a worker with that name, `publisher`
    the module that publishes, `kinds` what it can publish."""

    title: str
    package: str
    extras: str
    worker: Callable[[str], Sequence[str]]
    publisher: str
    kinds: Sequence[str]


def _celery(name: str) -> Sequence[str]:
    return ("celery", "-A", "streambroker.cli.demo.celery_app", "worker", "--pool", "prefork", "--concurrency",
            str(CONCURRENCY), "--hostname", f"{name}@%h", "--loglevel", "INFO")


def _dramatiq(name: str) -> Sequence[str]:
    return ("dramatiq", "streambroker.cli.demo.dramatiq_app", "--processes", "1", "--threads", str(CONCURRENCY))


FRAMEWORKS = {
    "celery": Framework("Celery", "celery", "embedded", _celery, "streambroker.cli.demo.celery_publish",
                        ("delay", "countdown", "retry", "chain", "group", "chord")),
    "dramatiq": Framework("Dramatiq", "dramatiq", "embedded,dramatiq", _dramatiq,
                          "streambroker.cli.demo.dramatiq_publish", ("delay", "countdown", "retry", "chain", "group"))}
