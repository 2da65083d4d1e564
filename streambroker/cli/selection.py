"""Which messages a command means: by id, by task, by reason."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from ..message import DeadLetter, Delayed, Message
from . import records
from .output import Progress

#: messages of one request to the store
BATCH = 200


def named(id: str, message: Message, wanted: Collection[str]) -> bool:
    """Whether the store's id or the framework's id of the job is among `wanted`."""
    return id in wanted or records.job(message) in wanted


def missing(wanted: Sequence[str], found: Iterable[DeadLetter | Delayed]) -> list[str]:
    """Those of `wanted` that no message of `found` answers to."""
    have = {name for each in found for name in (each.id, records.job(each.message))}
    return [name for name in wanted if name not in have]


def add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--type", metavar="TASK", help="only this task's")
    parser.add_argument("--reason", metavar="TEXT", help="only those with TEXT in their reason")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the N oldest of a queue")


def filtered(letters: Iterator[DeadLetter], args: argparse.Namespace) -> Iterator[DeadLetter]:
    """Dead letters that pass the options of `add_filters`, the oldest first."""
    passing = (dead for dead in letters
               if (args.type is None or records.task(dead.message) == args.type)
               and (args.reason is None or args.reason in dead.reason))
    return itertools.islice(passing, args.limit)


def positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def in_batches(what: str, ids: Sequence[str], act: Callable[[Sequence[str]], int]) -> int:
    """Runs `act` on all ids, some at a time, with a progress bar; the sum of what it returns."""
    done = 0
    with Progress(what, len(ids)) as progress:
        for start in range(0, len(ids), BATCH):
            batch = ids[start:start + BATCH]
            done += act(batch)
            progress.advance(len(batch))
    return done
