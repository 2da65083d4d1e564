"""`queues` and `workers`: what is there, and who has it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..engine import Inspector
from ..errors import StoreError
from ..message import QueueStats
from . import records
from .failures import OK, CommandError
from .options import known_queues, open_inspector, wants_json
from .output import age, plain, print_json, print_table
from .parsing import Commands, add_command


def add(commands: Commands) -> None:
    queues = add_command(
        commands, "queues", "counts of each queue: ready, delayed, in flight by holder, dead, oldest age",
        run_queues, """
        streambroker queues --url redis-streams://localhost:6379/0
        streambroker queues --url jetstream://localhost:4222
        streambroker queues celery mail --deliveries
        streambroker queues --json | jq '.[] | select(.dead > 0)'
        """)
    queues.add_argument("names", nargs="*", metavar="NAME", help="only these")
    queues.add_argument("--all", action="store_true", help="reply and control queues too")
    queues.add_argument("--deliveries", action="store_true", help="each unsettled delivery, the first 1000 of a queue")
    add_command(commands, "workers", "processes that consume now", run_workers, """
        streambroker workers --url redis-streams://localhost:6379/0
        """)


def run_queues(args: argparse.Namespace) -> int:
    with open_inspector(args) as inspector:
        found, failed = _stats(inspector, known_queues(inspector, args.names))
        shown = [stats for stats in found if args.all or args.names or stats.durable]
        if wants_json(args):
            print_json([_record(inspector, stats, args.deliveries) for stats in shown])
        else:
            _print_queues(inspector, shown, len(found) - len(shown), args.deliveries)
    if failed:
        raise CommandError("; ".join(f"queue {plain(name)!r}: {error}" for name, error in failed.items()))
    return OK


def run_workers(args: argparse.Namespace) -> int:
    with open_inspector(args) as inspector:
        workers = sorted(inspector.workers(), key=lambda worker: worker.holder)
        if wants_json(args):
            print_json([records.worker_record(worker) for worker in workers])
        elif not workers:
            print("no worker consumes here")
        else:
            print_table(("HOLDER", "HOST", "PID", "LEASE", "SEEN", "QUEUES"),
                        [(worker.holder, worker.host, worker.pid, age(worker.lease), age(worker.seen),
                          ", ".join(worker.queues)) for worker in workers])
    return OK


def _stats(inspector: Inspector, names: Sequence[str]) -> tuple[list[QueueStats], dict[str, StoreError]]:
    """A queue that cannot be read, for a foreign key in its place, costs no other."""
    found, failed = [], {}
    for name in names:
        try:
            found.append(inspector.stats(name))
        except StoreError as error:
            failed[name] = error
    return found, failed


def _record(inspector: Inspector, stats: QueueStats, deliveries: bool) -> dict[str, object]:
    record = records.stats_record(stats)
    if deliveries:
        record["deliveries"] = [records.in_flight_record(d) for d in inspector.in_flight(stats.queue)]
    return record


def _print_queues(inspector: Inspector, shown: Sequence[QueueStats], hidden: int, deliveries: bool) -> None:
    if shown:
        print_table(("QUEUE", "READY", "DELAYED", "IN FLIGHT", "DEAD", "OLDEST"),
                    [(s.queue, s.ready, s.delayed, s.in_flight, s.dead, age(s.oldest_age)) for s in shown])
    else:
        print("no queue here")
    if hidden:
        print(f"({hidden} reply and control queues not shown: --all)")
    for stats in shown:
        if stats.holders:
            print(f"\nin flight of {plain(stats.queue)}")
            if deliveries:
                print_table(("ID", "HOLDER", "AGE", "DELIVERIES"), [
                    (d.id, d.holder, age(d.age), d.count) for d in inspector.in_flight(stats.queue)])
            else:
                print_table(("HOLDER", "HAS", "OLDEST", "MOST DELIVERIES"), [
                    (h.holder, h.count, age(h.oldest_age), h.max_delivery_count) for h in stats.holders])
