"""The command `demo`: its options, its server, its last words."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from ...errors import StreambrokerError
from ..failures import FAILED, OK, CommandError
from ..options import open_engine, wants_json
from ..output import print_json
from ..parsing import Commands, add_command
from .frameworks import FRAMEWORKS
from .processes import environment
from .screen import Screen
from .server import SERVERS, serve_on
from .story import Outcome, Story

_PAUSE = 0.2
_SHOWN = 5


def add(commands: Commands) -> None:
    demo = add_command(commands, "demo", "publish jobs, kill a worker in the middle, show that every job ran", run, """
        streambroker demo
        streambroker demo --engine jetstream
        streambroker demo --framework dramatiq
        streambroker demo --keep
        """, store=False)
    demo.add_argument("--engine", choices=sorted(SERVERS), default="redis", help="embedded server; default: redis")
    demo.add_argument("--framework", choices=sorted(FRAMEWORKS), default="celery", help="default: celery")
    demo.add_argument("--keep", action="store_true", help="leave the server and its data, to look around")


def run(args: argparse.Namespace) -> int:
    framework = FRAMEWORKS[args.framework]
    if importlib.util.find_spec(framework.package) is None:
        raise CommandError(f"the demo needs {framework.title}: pip install 'streambroker[{framework.extras}]'")
    screen = Screen(sys.stderr if wants_json(args) else sys.stdout)
    directory = Path(tempfile.mkdtemp(prefix="streambroker-demo-"))
    remove = False
    try:
        with _interruptible() as pause:
            outcome, url, port = _play(args.engine, args.framework, directory, screen, pause)
            pid = serve_on(args.engine, directory / "server", port) if args.keep else None
        good = outcome.verdict.good
        remove = good and not args.keep
        seconds = screen.seconds
    except (KeyboardInterrupt, BrokenPipeError):
        remove = True
        raise
    except StreambrokerError:
        screen.say(f"it did not come to its end; logs and ledger: {directory}")
        raise
    finally:
        if remove:
            shutil.rmtree(directory, ignore_errors=True)
        screen.close()
    if wants_json(args):
        print_json({**dataclasses.asdict(outcome), "good": good, "seconds": seconds, "url": url if pid else None,
                    "server_pid": pid, "directory": None if remove else str(directory)})
    else:
        _print_outcome(outcome, seconds)
        if pid:
            print(f"\nThe server stays up, to look around:\n  streambroker queues --url {url}\n"
                  f"Stop it with:\n  kill {pid}\n"
                  f"Its data, the ledger and the logs of the workers are in:\n  {directory}")
        elif not good:
            print(f"\nLogs and ledger: {directory}")
    return OK if good else FAILED


def _play(engine: str, framework: str, directory: Path, screen: Screen,
          pause: Callable[[], None]) -> tuple[Outcome, str, int]:
    """The story on a server of its own. When this returns or raises nothing runs any more."""
    kind = SERVERS[engine]
    with kind.make(directory / "server") as server:
        screen.say(f"embedded server ({kind.keeps}) on {server.url}")
        env = environment(server.url, server.result_url, directory)
        with open_engine(server.url) as broker:
            story = Story(framework, broker.inspector(), screen, directory, env, pause)
            try:
                outcome = story.run()
                story.stop()
            finally:
                story.kill()
    return outcome, server.url, server.port


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """A pause that raises KeyboardInterrupt after SIGINT, SIGTERM or SIGHUP. Nowhere else do they disturb: a process
    that was just started is always known, and the end is always reached."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    def pause() -> None:
        time.sleep(_PAUSE)
        if came:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield pause
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_outcome(outcome: Outcome, seconds: float) -> None:
    verdict = outcome.verdict
    sign = "=" if verdict.published == verdict.done else ">"
    print(f"\npublished {verdict.published} {sign} done {verdict.done}, lost {len(verdict.lost)}, "
          f"doubled {len(verdict.doubled)}   ({seconds:.0f} s)")
    if outcome.recovery_seconds is not None:
        print(f"recovered {outcome.recovered} of {outcome.held} jobs of the killed worker within "
              f"{outcome.recovery_seconds:.1f} s of the kill")
    for reason, count in Counter(verdict.doubled.values()).items():
        runs = [run for run, why in verdict.doubled.items() if why == reason]
        print(f"  {count} started twice ({reason or 'NO KILL EXPLAINS IT'}): {_some(runs)}")
    if verdict.lost:
        print(f"  lost: {_some(verdict.lost)}")


def _some(runs: Sequence[str]) -> str:
    return ", ".join(runs[:_SHOWN]) + (", ..." if len(runs) > _SHOWN else "")
