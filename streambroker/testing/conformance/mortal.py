"""A consuming process that the suite kills for good.

Run as a module it is that process: commands as JSON lines on stdin, answers on stdout.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...connection import connect
from ...engine import Consumer, Engine
from ...message import Delivery
from .. import faults
from .kit import SOON, Taken, drain

#: seconds in which the rest of what is ready must arrive, once something did
MOMENT = 0.5


class Holding:
    """Consumers of one engine and what they hold."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._consumers: dict[str, Consumer] = {}
        self._held: dict[str, tuple[Consumer, Delivery]] = {}

    def take(self, queue: str, limit: int, timeout: float) -> list[Taken]:
        consumer = self._consumers.get(queue)
        if consumer is None:
            consumer = self._consumers[queue] = self.engine.consume([queue])
        if timeout:
            got = drain(consumer, 1, timeout)
            got += drain(consumer, limit - len(got), min(timeout, MOMENT)) if got else []
        else:
            got = consumer.fetch(limit)
        self._held.update({each.id: (consumer, each) for each in got})
        return [Taken(each.id, each.message.body, each.count, each.redelivered) for each in got]

    def settle(self, how: str, ids: list[str]) -> None:
        for each in ids:
            consumer, delivery = self._held[each]
            if how == "hand_back":
                consumer.hand_back([delivery])
            elif how == "dead_letter":
                consumer.dead_letter(delivery, "a mortal gave up")
            else:
                getattr(consumer, how)(delivery)
        self.flush()

    def flush(self) -> None:
        """Send what was settled; engines may hold it back for some 10 ms."""
        for _ in range(2):
            for consumer in self._consumers.values():
                consumer.receive(0, 0)
            time.sleep(0.05)

    def holder(self) -> str:
        inspector = self.engine.inspector()
        mine = {delivery.id for _, delivery in self._held.values()}
        return next(row.holder for queue in self._consumers for row in inspector.in_flight(queue) if row.id in mine)


class ProcessMortal:
    """A mortal in a process of its own."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        home = Path(__file__).parents[3]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, url, json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")])})
        self.pid = self._process.pid

    @property
    def holder(self) -> str:
        answer: str = self._ask("holder")
        return answer

    def take(self, queue: str, limit: int = 10, timeout: float = SOON) -> list[Taken]:
        return [Taken(key, base64.b64decode(body), count, redelivered)
                for key, body, count, redelivered in self._ask("take", queue, limit, timeout)]

    def settle(self, how: str, *ids: str) -> None:
        self._ask("settle", how, list(ids))

    def stop(self) -> None:
        faults.done["process frozen"] += 1
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def die(self) -> None:
        faults.done["process killed"] += self._process.poll() is None
        self._process.kill()
        self._process.communicate()

    def _ask(self, *command: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the mortal ended by itself: {self._process.wait()}"
        return json.loads(answer)


def _main(url: str, options: str) -> None:
    holding = Holding(connect(url, **json.loads(options)))
    for line in sys.stdin:
        word, *arguments = json.loads(line)
        answer = getattr(holding, word)(*arguments)
        if word == "take":
            answer = [[each.id, base64.b64encode(each.body).decode(), each.count, each.redelivered] for each in answer]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
