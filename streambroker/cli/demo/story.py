"""The demo from its beginning to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...engine import Inspector
from . import plan
from .frameworks import FRAMEWORKS
from .ledger import Ledger
from .processes import LEDGER, Process
from .screen import Now, Screen
from .verdict import Kill, Verdict, judge
from .watch import Watch

#: share of the jobs that is done when the worker is killed, and how many it must be busy with
_MIDDLE, _BUSY = 0.3, 2
#: longer than a lease: without any progress for so long nothing more will come
_STALLED = 45.0
_STOP_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """`recovery_seconds` is None when the killed worker's deliveries were not all taken over."""

    verdict: Verdict
    held: int
    recovered: int
    recovery_seconds: float | None


class Story:
    """Starts the processes, kills one in the middle, waits for the end. Not thread-safe.

    `pause` is called several times a second; what it raises ends the story.
    """

    def __init__(self, framework: str, inspector: Inspector, screen: Screen, directory: Path, env: Mapping[str, str],
                 pause: Callable[[], None]) -> None:
        self._framework = FRAMEWORKS[framework]
        self._screen = screen
        self._directory = directory
        self._env = env
        self._pause = pause
        self._ledger = Ledger(directory / LEDGER)
        self._watch = Watch(inspector, self._ledger)
        self._processes: list[Process] = []
        self._stories = list(plan.stories(framework))
        self._total = sum(len(story.runs) for story in self._stories)

    def run(self) -> Outcome:
        """Raises CommandError when a process ends by itself or nothing goes on."""
        alpha, beta = self._start_worker("alpha"), self._start_worker("beta")
        self._start("publisher", [self._framework.publisher])
        self._screen.say(f"{self._total} jobs are published; two {self._framework.title} workers start: alpha "
                         f"(pid {alpha.pid}), beta (pid {beta.pid})")
        self._follow(lambda now: self._watch.consuming({alpha.pid, beta.pid}))
        self._screen.say("both consume")
        holder = self._watch.holder(alpha.pid)
        self._follow(lambda now: now.done >= self._total * _MIDDLE and len(self._ledger.running("alpha")) >= _BUSY)
        kill = Kill("alpha", time.time())
        self._processes.remove(alpha)
        alpha.kill()
        self._watch.killed(holder)
        self._screen.say(f"alpha and its children are killed (SIGKILL) while it holds {len(self._watch.held)} jobs")
        gamma = self._start_worker("gamma")
        self._screen.say(f"a worker starts in its place: gamma (pid {gamma.pid})")
        try:
            self._follow(self._over)
        except TimeoutError:
            self._screen.say(f"nothing went on for {_STALLED:.0f} s")
        parents = {run: before for story in self._stories for run, before in plan.parents(story).items()}
        return Outcome(judge(self._ledger.events, parents, kill), len(self._watch.held), len(self._watch.recovered),
                       self._watch.recovery_seconds)

    def stop(self) -> None:
        """Warm shutdown of all workers at the same time."""
        for process in self._processes:
            process.ask_to_stop()
        limit = time.monotonic() + _STOP_TIMEOUT
        for process in self._processes:
            process.wait_stopped(max(0.0, limit - time.monotonic()))

    def kill(self) -> None:
        """End all processes at once."""
        for process in self._processes:
            process.kill()

    def _start_worker(self, name: str) -> Process:
        return self._start(name, self._framework.worker(name))

    def _start(self, name: str, module: Sequence[str]) -> Process:
        process = Process(name, module, self._directory, self._env)
        self._processes.append(process)
        return process

    def _over(self, now: Now) -> bool:
        """All jobs have run, and nothing is on its way to run a second time."""
        return now.published == now.done == self._total and not now.queued + now.running + now.delayed \
            and now.recovered == now.held

    def _follow(self, reached: Callable[[Now], bool]) -> None:
        """Look and show until `reached`. Raises TimeoutError when nothing goes on."""
        before, since = None, time.monotonic()
        while True:
            now = self._watch.now()
            self._screen.show(now)
            if reached(now):
                return
            for process in self._processes:
                process.check()
            if now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > _STALLED:
                raise TimeoutError
            self._pause()
