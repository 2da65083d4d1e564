"""`delayed` and `purge`: messages that nobody has yet."""

from __future__ import annotations

import argparse
from functools import partial

from . import records
from .failures import FAILED, OK, CommandError
from .options import add_yes_option, known_queues, open_inspector, wants_json
from .output import Progress, confirm, moment, plain, print_json, print_table
from .parsing import Commands, add_command, add_group
from .selection import in_batches, missing, named, positive


def add(commands: Commands) -> None:
    delayed = add_group(commands, "delayed", "messages that wait for their time: eta, countdown, retry")
    ls = add_command(delayed, "ls", "list waiting messages, the next due first", run_ls, """
        streambroker delayed ls --url redis-streams://localhost:6379/0
        streambroker delayed ls -Q celery --limit 20
        """)
    ls.add_argument("-Q", "--queue", action="append", metavar="QUEUE", help="may be repeated; default: all")
    ls.add_argument("--limit", type=positive, metavar="N", help="only the N that are due next")

    rm = add_command(delayed, "rm", "remove waiting messages: they never run", run_rm, """
        streambroker delayed rm -Q celery 4f5c9f2e-7d3c-4c59-a9c3-0a8f6b6e3a52
        """)
    rm.add_argument("-Q", "--queue", action="append", metavar="QUEUE", help="default: look in all")
    rm.add_argument("ids", nargs="+", metavar="ID", help="as `delayed ls` prints it, or the task's id")
    add_yes_option(rm)

    purge = add_command(commands, "purge", "remove the ready and delayed messages of queues, never running ones",
                        run_purge, """
        streambroker purge -Q celery
        streambroker purge -Q celery -Q mail --yes --json
        """)
    purge.add_argument("-Q", "--queue", action="append", required=True, metavar="QUEUE", help="may be repeated")
    add_yes_option(purge)


def run_ls(args: argparse.Namespace) -> int:
    with open_inspector(args) as inspector:
        waiting = [each for queue in known_queues(inspector, args.queue) for each in inspector.delayed(queue)]
    waiting.sort(key=lambda each: each.due)
    waiting = waiting[:args.limit]
    if wants_json(args):
        print_json([records.delayed_record(each) for each in waiting])
    elif not waiting:
        print("nothing waits")
    else:
        print_table(("QUEUE", "DUE", "TASK", "TASK ID", "ID"),
                    [(each.queue, moment(each.due), records.task(each.message), records.job(each.message), each.id)
                     for each in waiting])
    return OK


def run_rm(args: argparse.Namespace) -> int:
    wanted = set(args.ids)
    with open_inspector(args) as inspector:
        found = [each for queue in known_queues(inspector, args.queue) for each in inspector.delayed(queue)
                 if named(each.id, each.message, wanted)]
        absent = missing(args.ids, found)
        if absent:
            raise CommandError(f"{', '.join(map(plain, absent))} does not wait here: nothing was changed. "
                               "`streambroker delayed ls` lists what does.", FAILED)
        confirm(f"Remove {len(found)} waiting messages?", yes=args.yes)
        removed = 0
        for queue in sorted({each.queue for each in found}):
            ids = [each.id for each in found if each.queue == queue]
            removed += in_batches("removed", ids, partial(inspector.delayed_remove, queue))
    if wants_json(args):
        print_json({"removed": removed})
    else:
        print(f"removed {removed} waiting messages")
    return OK


def run_purge(args: argparse.Namespace) -> int:
    with open_inspector(args) as inspector:
        queues = known_queues(inspector, args.queue)
        names = ", ".join(map(plain, queues))
        stats = [inspector.stats(queue) for queue in queues]
        confirm(f"Remove {sum(s.ready for s in stats)} ready and {sum(s.delayed for s in stats)} delayed messages of "
                f"{names}?", yes=args.yes)
        purged = []
        with Progress("purged queues", len(queues)) as progress:
            for queue in queues:
                purged.append({"queue": queue, "removed": inspector.purge(queue)})
                progress.advance(1)
    if wants_json(args):
        print_json(purged)
    else:
        for each in purged:
            print(f"removed {each['removed']} messages of {plain(str(each['queue']))}")
    return OK
