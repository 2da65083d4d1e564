"""One soak: store, fleet, plan, and the wait for its end."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from integration.base import leftovers
from integration.ledger import Ledger, append
from integration.soak.fleet import Fleet, strike
from integration.soak.jobs import QUEUES
from integration.soak.plan import STORE, Event, make_plan
from integration.soak.verdict import Verdict, judge
from integration.stores import make_server
from streambroker.connection import connect
from streambroker.engine import Engine
from streambroker.errors import StreambrokerError

#: seconds that all that is published may take to end when nothing disturbs any more
_DRAIN = 120.0
#: seconds that the store may take to be at its base when nobody uses it any more
_BASE = 40.0
_PREFIX = "soak"


@dataclass(frozen=True)
class Options:
    """`server` is a kind of `integration.stores`, `rate` jobs a second, `lease` seconds."""

    engine: str
    framework: str
    minutes: float
    seed: int
    server: str
    rate: float = 6.0
    lease: float = 10.0


class Soak:
    """Runs once; logs and ledger are in `folder`. Tells on standard error what happens."""

    def __init__(self, options: Options, folder: Path) -> None:
        self._options = options
        self._ledger = Ledger(folder / "ledger.jsonl")
        self._server = make_server(options.server, aof=True, fsync="always")
        self._fleet = Fleet(self._server, options.framework, folder, self._ledger, prefix=_PREFIX, seed=options.seed,
                            rate=options.rate, lease=options.lease)
        self._over = threading.Event()
        self._troubles: list[str] = []
        self._told = 0.0
        self._began = 0.0

    def run(self) -> Verdict:
        """Blocks until the end, some minutes longer than asked at most; leaves no process behind."""
        options = self._options
        plan = make_plan(options.seed, options.minutes, {**self._fleet.lanes(), STORE: STORE}, options.lease)
        with self._server as server:
            try:
                engine = self._watch()
                self._begin()
                lanes = [threading.Thread(target=self._lane, args=(target, [e for e in plan if e.target == target]))
                         for target in (*self._fleet.members, STORE)]
                for lane in lanes:
                    lane.start()
                while time.monotonic() - self._began < options.minutes * 60:
                    self._look(engine)
                    time.sleep(1)
                self._over.set()
                for lane in lanes:
                    lane.join()
                self._end(engine)
                left = self._left(engine)
                version = server.version()
            finally:
                self._over.set()
                self._fleet.close()
        self._say(f"the store was {version}")
        return judge(self._ledger.lines(), left=left, troubles=self._troubles, bound=options.lease + 5)

    def _watch(self) -> Engine:
        """Past all proxies."""
        steps = {"priority_steps": (0, 1, 2, 3)} if self._options.framework == "dramatiq" else {}
        return connect(self._server.url(), prefix=_PREFIX, publish_timeout=1.0, **steps)

    def _begin(self) -> None:
        for worker in self._fleet.workers:
            worker.process.start(wait=False)
        for worker in self._fleet.workers:
            worker.process.wait_ready(90)
        for producer in self._fleet.producers:
            producer.start()
        self._began = time.monotonic()

    # ------------------------------------------------------------------ disturbances
    def _lane(self, target: str, events: Sequence[Event]) -> None:
        """What happens to one target, one thing after the other. In between a worker that ended is started again."""
        for event in [*events, None]:
            while not self._over.wait(0.5):
                self._revive(target)
                if event is not None and time.monotonic() - self._began >= event.at:
                    self._disturb(event)
                    break
            else:
                return

    def _disturb(self, event: Event) -> None:
        lasting = f" for {event.seconds} s" if event.seconds else ""
        self._say(f"{event.target}: {event.what}{lasting}")
        began = time.time()
        try:
            if event.target == STORE:
                strike(self._server, event.what, event.seconds)
            else:
                self._fleet.members[event.target].suffer(event.what, event.seconds)
        except (AssertionError, StreambrokerError) as error:
            self._trouble(f"{event.target}: {event.what}: {error}")
        self._note(event.what, "" if event.target == STORE else event.target, began)

    def _revive(self, target: str) -> None:
        if target == STORE:
            return
        member, began = self._fleet.members[target], time.time()
        if member in self._fleet.producers:
            # another one would publish the same jobs again
            trouble = f"{target}: ended by itself, see {member.process.log}"
            if not member.process.alive and trouble not in self._troubles:
                self._trouble(trouble)
            return
        try:
            if member.revive():
                self._say(f"{target}: had ended and was started again")
                self._note("ended by itself", target, began)
        except StreambrokerError as error:
            self._trouble(f"{target}: {error}")

    def _note(self, what: str, worker: str, began: float) -> None:
        append(self._ledger.path, "disturbed", "", what=what, worker=worker, began=began, until=time.time())

    # ------------------------------------------------------------------ the end
    def _end(self, engine: Engine) -> None:
        """Nothing disturbs any more: wait for what is published, then stop all cleanly."""
        for member in self._fleet.members.values():
            member.heal()
            self._revive(member.name)
        for producer in self._fleet.producers:
            self._stop(producer.name)
        self._say("no disturbances any more, waiting for what is there")
        end = time.monotonic() + _DRAIN
        while not self._drained(engine):
            self._look(engine)
            for worker in self._fleet.workers:  # poison goes on killing
                self._revive(worker.name)
            if time.monotonic() > end:
                self._trouble(f"not empty {_DRAIN:.0f} s after the last disturbance: {self._counts(engine)}")
                break
            time.sleep(0.5)
        for worker in self._fleet.workers:
            worker.note_memory()
        for worker in self._fleet.workers:
            self._stop(worker.name)

    def _stop(self, name: str) -> None:
        try:
            self._fleet.members[name].process.stop(timeout=45)
        except AssertionError as error:
            self._trouble(f"{name}: {error}")

    def _drained(self, engine: Engine) -> bool:
        inspector = engine.inspector()
        return not any(stats.ready or stats.delayed or stats.in_flight for stats in map(inspector.stats, QUEUES))

    def _left(self, engine: Engine) -> list[str]:
        """Note the dead letters, remove them, and see what else is there."""
        inspector = engine.inspector()
        for queue in QUEUES:
            letters = list(inspector.dead(queue))
            for letter in letters:
                append(self._ledger.path, "dead", _job_of(letter.message.body), reason=letter.reason)
            inspector.dead_remove(queue, [letter.id for letter in letters])
        engine.close()
        end = time.monotonic() + _BASE
        while (left := leftovers(self._server, _PREFIX)) and time.monotonic() < end:
            time.sleep(0.5)
        return left

    # ------------------------------------------------------------------ telling
    def _look(self, engine: Engine) -> None:
        """Now and then: progress, and how large the workers are."""
        every = 1.0 if sys.stderr.isatty() else 10.0
        if time.monotonic() - self._told < every:
            return
        self._told = time.monotonic()
        for worker in self._fleet.workers:
            worker.note_memory()
        counts = {kind: len(self._ledger.ids(kind)) for kind in ("publishing", "published", "end")}
        line = (f"{counts['publishing']} published, {counts['published']} confirmed, {counts['end']} done, "
                f"{self._counts(engine)}")
        if sys.stderr.isatty():
            print(f"\r{self._clock()} {line}\033[K", end="", file=sys.stderr, flush=True)
        else:
            self._say(line)

    def _counts(self, engine: Engine) -> str:
        try:
            stats = [engine.inspector().stats(queue) for queue in QUEUES]
        except StreambrokerError:
            return "the store does not answer"
        return ", ".join(f"{sum(getattr(each, name) for each in stats)} {name.replace('_', ' ')}"
                         for name in ("ready", "delayed", "in_flight", "dead"))

    def _trouble(self, text: str) -> None:
        self._troubles.append(text)
        self._say(f"TROUBLE {text}")

    def _say(self, text: str) -> None:
        start = "\r\033[K" if sys.stderr.isatty() else ""
        print(f"{start}{self._clock()} {text}", file=sys.stderr, flush=True)

    def _clock(self) -> str:
        return f"{time.strftime('%H:%M:%S')} {time.monotonic() - self._began if self._began else 0:6.1f}"


def _job_of(body: bytes) -> str:
    """Celery's bodies are a list of arguments, keywords and more, Dramatiq's an object."""
    told = json.loads(body)
    return str(told["args"][0] if isinstance(told, dict) else told[0][0])
