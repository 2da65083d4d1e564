"""`dead`: messages that nobody gets any more. Look at them, replay them, remove them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ..engine import Inspector
from ..message import DeadLetter
from . import records
from .failures import FAILED, OK, CommandError
from .options import add_yes_option, known_queues, open_inspector, wants_json
from .output import age, confirm, moment, plain, print_json, print_table
from .parsing import Commands, add_command, add_group
from .selection import add_filters, filtered, in_batches, missing, named


def add(commands: Commands) -> None:
    dead = add_group(commands, "dead", "dead letters: list, show, replay, remove")
    ls = add_command(dead, "ls", "list dead letters, the oldest first", run_ls, """
        streambroker dead ls --url redis-streams://localhost:6379/0
        streambroker dead ls -Q celery --type shop.charge --json
        """)
    ls.add_argument("-Q", "--queue", action="append", metavar="QUEUE", help="may be repeated; default: all")
    add_filters(ls)

    show = add_command(dead, "show", "one dead letter with all that is kept of it", run_show, """
        streambroker dead show -Q celery 1718000000000-0
        """)
    show.add_argument("-Q", "--queue", action="append", metavar="QUEUE", help="default: look in all")
    show.add_argument("id", metavar="ID", help="as `dead ls` prints it, or the task's id")

    replay = add_command(dead, "replay", "put dead letters back into their queue, as new deliveries", run_replay, """
        streambroker dead replay -Q celery 1718000000000-0
        streambroker dead replay -Q celery --reason "unknown task" --limit 100 --yes
        """)
    replay.add_argument("-Q", "--queue", required=True, metavar="QUEUE")
    replay.add_argument("ids", nargs="*", metavar="ID", help="default: all")
    add_filters(replay)
    add_yes_option(replay)

    rm = add_command(dead, "rm", "remove single dead letters for good", run_rm, """
        streambroker dead rm -Q celery 1718000000000-0
        """)
    rm.add_argument("-Q", "--queue", required=True, metavar="QUEUE")
    rm.add_argument("ids", nargs="+", metavar="ID")
    add_yes_option(rm)

    purge = add_command(dead, "purge", "remove all dead letters of a queue, or some, for good", run_purge, """
        streambroker dead purge -Q celery
        streambroker dead purge -Q celery --type shop.charge --yes
        """)
    purge.add_argument("-Q", "--queue", required=True, metavar="QUEUE")
    add_filters(purge)
    add_yes_option(purge)


def run_ls(args: argparse.Namespace) -> int:
    with open_inspector(args) as inspector:
        letters = [dead for queue in known_queues(inspector, args.queue)
                   for dead in filtered(inspector.dead(queue), args)]
    if wants_json(args):
        print_json([records.dead_record(dead) for dead in letters])
    elif not letters:
        print("no dead letters")
    else:
        print_table(("QUEUE", "ID", "TASK", "DELIVERIES", "DIED", "REASON"),
                    [(dead.queue, dead.id, records.task(dead.message), dead.count, moment(dead.last), dead.reason)
                     for dead in letters])
    return OK


def run_show(args: argparse.Namespace) -> int:
    with open_inspector(args) as inspector:
        queues = known_queues(inspector, args.queue)
        found = next((dead for queue in queues for dead in inspector.dead(queue)
                      if named(dead.id, dead.message, (args.id,))), None)
    if found is None:
        raise CommandError(f"no dead letter {plain(args.id)!r}; `streambroker dead ls` lists what is there.", FAILED)
    details = records.dead_details(found)
    if wants_json(args):
        print_json(details)
    else:
        _print_details(found, details)
    return OK


def run_replay(args: argparse.Namespace) -> int:
    return _change(args, args.ids, "Replay", "replayed", lambda inspector: inspector.replay)


def run_rm(args: argparse.Namespace) -> int:
    return _change(args, args.ids, "Remove", "removed", lambda inspector: inspector.dead_remove)


def run_purge(args: argparse.Namespace) -> int:
    return _change(args, (), "Remove", "removed", lambda inspector: inspector.dead_remove)


def _change(args: argparse.Namespace, wanted: Sequence[str], verb: str, done: str,
            action: Callable[[Inspector], Callable[[str, Sequence[str]], int]]) -> int:
    """Does `action` to the chosen dead letters of one queue, after asking. What came in the meantime is left."""
    with open_inspector(args) as inspector:
        [queue] = known_queues(inspector, [args.queue])
        letters = inspector.dead(queue)
        if wanted:
            chosen = [dead for dead in letters if named(dead.id, dead.message, set(wanted))]
            _require(queue, missing(wanted, chosen))
        else:
            chosen = list(filtered(letters, args))
        count = 0
        if chosen:
            confirm(f"{verb} {len(chosen)} dead letters of {plain(queue)!r}?", yes=args.yes)
            act = action(inspector)
            count = in_batches(done, [dead.id for dead in chosen], partial(act, queue))
    if wants_json(args):
        print_json({"queue": queue, done: count})
    else:
        print(f"{done} {count} dead letters of {plain(queue)}")
    return OK


def _require(queue: str, absent: Sequence[str]) -> None:
    if absent:
        raise CommandError(f"no dead letter {', '.join(map(plain, absent))} in {plain(queue)!r}: nothing was changed. "
                           f"`streambroker dead ls -Q {plain(queue)}` lists what is there.", FAILED)


def _print_details(dead: DeadLetter, details: dict[str, object]) -> None:
    lines = {
        "queue": dead.queue, "id": dead.id, "task": records.task(dead.message), "task id": records.job(dead.message),
        "reason": dead.reason, "deliveries": dead.count, "published": moment(dead.first),
        "died": f"{moment(dead.last)} ({age(dead.last - dead.first)} later)", "last holder": dead.holder or "-",
        "priority": dead.message.priority, "size": f"{len(dead.message.body)} bytes"}
    for name, value in lines.items():
        print(f"{name + ':':<13}{plain(str(value))}")
    print("\nhead")
    for line in json.dumps(dead.message.headers, indent=2, ensure_ascii=False).splitlines():
        print(f"  {plain(line)}")
    for name, value in sorted(dead.fields.items()):
        print(f"  {plain(name)}: {plain(value.decode(errors='backslashreplace'))}")
    body = "body" if "body" in details else "body_base64"
    print(f"\n{body.replace('_', ', ')}")
    for line in _readable(str(details[body])):
        print(f"  {plain(line)}")


def _readable(text: str) -> Iterator[str]:
    """JSON by lines, and the lines of its texts, tracebacks for one, below each other."""
    try:
        parsed = json.loads(text)
    except ValueError:
        yield text
        return
    for line in json.dumps(parsed, indent=2, ensure_ascii=False).splitlines():
        first, *rest = line.split("\\n")
        yield first
        for each in rest:
            yield " " * (len(line) - len(line.lstrip()) + 2) + each
