"""Waiting for values without polling: the server sends on what is put, and what is there already is read once.

In the link's thread one watcher keeps a subscription for each key that anybody waits for. It subscribes first and reads
then, so nothing falls between; it reads again after each reconnect, and now and then, since an election may swallow
what the server sends on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType

from ..engines.jetstream.link import Link, Listener, Reply
from ..engines.jetstream.waiter import Waiter, make_waiter
from ..errors import AuthenticationError, Closed, StoreConnectionError, StoreError
from .stream import ResultStream, Stored, stored

logger = logging.getLogger(__name__)

#: seconds after which all that is waited for is read again, and after which a failed reading is
_AGAIN, _RETRY = 15.0, 0.5
#: keys that are subscribed to or read at once
_WINDOW = 200
#: how long one reading may take (seconds)
_TIMEOUT = 5.0
#: longest single wait, so that a refused login is noticed (seconds)
_WAIT = 5.0


class Watch:
    """What was put under the keys of one waiter, who may be any thread or greenlet, one at a time."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._news: deque[tuple[str, Stored]] = deque()
        self._waiter: Waiter | None = None
        #: key -> sequence of what was told last; in the link's thread
        self.told: dict[str, int] = {}

    def add(self, keys: Mapping[str, int]) -> None:
        """Tell of these from now on: of the present value, unless its sequence is the one given (0: any), and of each
        that is put. Returns at once."""
        self._watcher.add(self, dict(keys))

    def discard(self, keys: Iterable[str]) -> None:
        """Tell no more of these. Takes no lock: the garbage collector may call it anywhere."""
        self._watcher.discard(self, list(keys))

    def take(self, timeout: float) -> list[tuple[str, Stored]]:
        """Keys and values since the last time, as soon as there are any, at most `timeout` seconds later. A value may
        come twice. Raises StoreError when the store refuses, AuthenticationError and ConfigurationError when it cannot
        be reached for good."""
        if not self._news and timeout > 0:
            self._waiter = waiter = make_waiter()
            try:
                if not self._news:
                    waiter.wait(min(timeout, _WAIT))
            finally:
                self._waiter = None
                waiter.done()
        if not self._news:
            self._watcher.check()
        taken = []
        while self._news:
            taken.append(self._news.popleft())
        return taken

    def close(self) -> None:
        self._watcher.drop(self)

    def tell(self, key: str, value: Stored) -> None:
        """In the link's thread."""
        if self.told.get(key) == value.sequence:
            return
        self.told[key] = value.sequence
        self._news.append((key, value))
        self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            waiter.set()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


class _Key:
    """Who waits for it, and the subscription."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.watches: set[Watch] = set()
        self.listener: Listener | None = None


class Watcher:
    """Of one store. What begins with an underscore runs in the link's thread, and only that touches the tables."""

    def __init__(self, link: Link, stream: ResultStream) -> None:
        self._link = link
        self._stream = stream
        self.reset()

    def reset(self) -> None:
        """In a forked child: nobody waits."""
        self._keys: dict[str, _Key] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        #: what the server refused, when that was
        self._refusal = ""

    def check(self) -> None:
        """Raises what makes waiting useless."""
        if self._refusal:
            raise StoreError(self._refusal)
        if not self._link.connected:
            error = self._link.failure()
            if isinstance(error, AuthenticationError) or not isinstance(error, StoreConnectionError):
                raise error

    def add(self, watch: Watch, keys: Mapping[str, int]) -> None:
        self._link.call_soon(partial(self._add, watch, keys))

    def discard(self, watch: Watch, keys: Sequence[str]) -> None:
        self._soon(partial(self._discard, watch, keys))

    def drop(self, watch: Watch) -> None:
        self._soon(partial(self._drop, watch))

    def connected(self) -> None:
        """In the link's thread, after each connect."""
        self._look_for(list(self._keys))

    def _soon(self, callback: partial[None]) -> None:
        try:
            self._link.call_soon(callback)
        except Closed:
            return

    def _add(self, watch: Watch, keys: Mapping[str, int]) -> None:
        for key, sequence in keys.items():
            self._keys.setdefault(key, _Key(key)).watches.add(watch)
            watch.told.setdefault(key, sequence)
        if self._timer is None:
            self._timer = self._link.call_later(_AGAIN, self._again)
        if self._link.connected:
            self._look_for(list(keys))

    def _discard(self, watch: Watch, keys: Sequence[str]) -> None:
        for key in keys:
            watch.told.pop(key, None)
            entry = self._keys.get(key)
            if entry is not None:
                entry.watches.discard(watch)
                if not entry.watches:
                    del self._keys[key]
                    if entry.listener is not None:
                        entry.listener.close()

    def _drop(self, watch: Watch) -> None:
        self._discard(watch, list(watch.told))

    def _again(self) -> None:
        self._timer = self._link.call_later(_AGAIN, self._again) if self._keys else None
        if self._link.connected:
            self._look_for(list(self._keys))

    def _try_again(self) -> None:
        self._retry = None
        self._look_for(list(self._keys))

    def _look_for(self, keys: Sequence[str]) -> None:
        if keys:
            self._link.spawn(self._look(keys))

    async def _look(self, keys: Sequence[str]) -> None:
        """Subscribe where nobody did, then tell what is there. What a broken link ends is done after the reconnect."""
        try:
            await self._stream.aensure()
            for part in _parts(keys):
                entries = [entry for key in part if (entry := self._keys.get(key)) is not None]
                await asyncio.gather(*(self._listen(entry) for entry in entries if entry.listener is None))
                await asyncio.gather(*(self._read(entry) for entry in entries))
            self._refusal = ""
        except StoreError as error:
            self._refusal = str(error)
            for watch in {watch for entry in self._keys.values() for watch in entry.watches}:
                watch.wake()
            self._later()
        except StoreConnectionError as error:
            logger.debug("cannot look for results: %s", error)
            self._later()

    def _later(self) -> None:
        self._stream.forget()
        if self._link.connected and self._retry is None:
            self._retry = self._link.call_later(_RETRY, self._try_again)

    async def _listen(self, entry: _Key) -> None:
        listener = await self._link.alisten(self._stream.news(entry.key), partial(self._told, entry))
        if entry.listener is not None or self._keys.get(entry.key) is not entry:
            listener.close()
        else:
            entry.listener = listener

    async def _read(self, entry: _Key) -> None:
        found = self._stream.read(await self._link.ask(self._stream.get(self._stream.value(entry.key)), _TIMEOUT))
        if found is not None:
            self._tell(entry, found)

    def _told(self, entry: _Key, reply: Reply) -> None:
        self._tell(entry, stored(reply))

    @staticmethod
    def _tell(entry: _Key, value: Stored) -> None:
        for watch in list(entry.watches):
            watch.tell(entry.key, value)


def _parts(keys: Sequence[str]) -> Iterable[Sequence[str]]:
    return [keys[start:start + _WINDOW] for start in range(0, len(keys), _WINDOW)]
