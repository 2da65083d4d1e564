"""The workers that the store knows of: signing on, signs of life, signing off."""

from __future__ import annotations

import json
from typing import Any

from ...message import Worker
from ...settings import Settings
from .commands import Commands
from .holder import Holder
from .keys import Keys
from .lookout import PROOF
from .resp import ReplyError, pack, text_of
from .scripts import script


class Registry:
    """One holder's entry in it. `lease` runs from each look to the next."""

    def __init__(self, keys: Keys, settings: Settings, holder: Holder) -> None:
        self._keys = keys
        self._holder = holder
        self._proof = int(settings.proof_of_death)
        self._lease = settings.visibility_timeout
        self._lease_ms = int(settings.visibility_timeout * 1000)
        # a little less than the time between two looks, which may come early
        self._apart_ms = int(min(PROOF, settings.visibility_timeout / 3) * 975)
        self.registered = False

    @property
    def _workers(self) -> str:
        return f"{self._keys.common}:workers"

    def _life(self, holder: str) -> str:
        return f"{self._keys.common}:w:{holder}"

    def register(self, commands: Commands, queues: list[str], patience: float | None = None) -> None:
        """Known from the answer on; again whenever the queues change."""
        name = self._holder.name
        commands.script("register", [self._workers, self._life(name)], name, self._holder.info(queues, self._lease),
                        self._lease_ms, self._keys.watch, patience=patience)
        self.registered = True

    def unregister(self, commands: Commands) -> None:
        common, name = self._keys.common, self._holder.name
        commands.script("unregister", [self._workers, self._life(name), f"{common}:gone", f"{common}:server",
                                       f"{common}:gate"], name, patience=0.5)
        self.registered = False

    def look_command(self) -> bytes:
        common = self._keys.common
        keys = [self._workers, self._life(self._holder.name), f"{common}:gone", f"{common}:dead", f"{common}:gate",
                f"{common}:server", self._keys.timers, *self._keys.guard]
        return script("look").call(keys, self._holder.name, self._lease_ms, self._proof, self._keys.alive(""),
                                   self._life(""), self._lease_ms, self._apart_ms, self._keys.watch)

    def forget(self, commands: Commands, holder: str) -> None:
        """A gone holder was reclaimed everywhere."""
        commands.script("forget", [f"{self._keys.common}:dead", self._keys.timers], holder)

    def names(self, commands: Commands) -> set[str]:
        return {text_of(name) for name in commands.call("HKEYS", self._workers)}

    def workers(self, commands: Commands) -> list[Worker]:
        flat: list[bytes] = commands.call("HGETALL", self._workers)
        names = [text_of(name) for name in flat[::2]]
        left = commands.many([pack("PTTL", self._life(name)) for name in names]) if names else []
        found = [_worker(name, text, ms) for name, text, ms in zip(names, flat[1::2], left, strict=True)]
        return [worker for worker in found if worker is not None]


def read_info(text: bytes) -> dict[str, Any]:
    """What a holder told of itself; empty when it is none of ours."""
    try:
        info = json.loads(text)
        queues = info["queues"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    if not isinstance(queues, list) or not all(isinstance(queue, str) for queue in queues):
        return {}
    return dict(info)


def _worker(name: str, text: bytes, ms: int | ReplyError) -> Worker | None:
    info = read_info(text)
    try:
        lease, host, pid = float(info["lease"]), str(info["host"]), int(info["pid"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    seen = lease - ms / 1000 if isinstance(ms, int) and ms >= 0 else lease
    return Worker(name, host, pid, tuple(info["queues"]), lease, max(0.0, seen))
