"""One real OS thread with an asyncio loop of its own, fit for a process where gevent or eventlet patched everything:
sockets, selectors and threads are the original ones.
"""

from __future__ import annotations

import asyncio
import logging
import math
import select
import selectors
import socket
import weakref
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ...errors import Closed
from ...real import make_lock, original, start_thread

logger = logging.getLogger(__name__)


class PollSelector(selectors.BaseSelector):
    """By `poll` as it was before any patching; a loop of ours watches three descriptors."""

    def __init__(self) -> None:
        self._poll: Any = original("select", "poll")()
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        if fd in self._keys:
            raise KeyError(f"descriptor {fd} is registered")
        key = self._keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        self._poll.register(fd, (select.POLLIN if events & selectors.EVENT_READ else 0)
                            | (select.POLLOUT if events & selectors.EVENT_WRITE else 0))
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys.pop(fd)
        self._poll.unregister(fd)
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        wait = None if timeout is None else max(0, math.ceil(timeout * 1000))
        ready = []
        for fd, seen in self._poll.poll(wait):
            key = self._keys[fd]
            # a hang-up or an error shows as what the loop asked for: its next read or write tells
            events = ((selectors.EVENT_READ if seen & ~select.POLLOUT else 0)
                      | (selectors.EVENT_WRITE if seen & ~select.POLLIN else 0))
            if events & key.events:
                ready.append((key, events & key.events))
        return ready

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class Loop(asyncio.SelectorEventLoop):
    """Knows the transport of its latest connection, so that one which hangs can be cut."""

    def __init__(self, *, keepalive: bool) -> None:
        super().__init__(PollSelector())
        self._keepalive = keepalive
        self._cuttable: weakref.WeakSet[asyncio.BaseTransport] = weakref.WeakSet()

    async def getaddrinfo(self, host: Any, port: Any, **hints: Any) -> list[Any]:
        """In a thread of its own: a name server may take long, and the usual executor's threads may be greenlets."""
        found: asyncio.Future[list[Any]] = self.create_future()

        def tell(answer: list[Any] | OSError) -> None:
            if found.done():
                return
            if isinstance(answer, OSError):
                found.set_exception(answer)
            else:
                found.set_result(answer)

        def look_up() -> None:
            answer: list[Any] | OSError
            try:
                answer = original("socket", "getaddrinfo")(host, port, **hints)
            except OSError as error:
                answer = error
            try:
                self.call_soon_threadsafe(tell, answer)
            except RuntimeError:
                return  # the loop ended meanwhile

        start_thread(look_up)
        return await found

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None,  # type: ignore[override]
                                **options: Any) -> Any:
        """As asyncio's, on an original socket."""
        if host is not None:
            options["sock"] = await self._connected_socket(host, port)
        transport, protocol = await super().create_connection(factory, **options)
        self._cuttable.add(transport)
        return transport, protocol

    async def _connected_socket(self, host: str, port: int) -> Any:
        """To the first address of `host` that takes it; raises the last one's error."""
        addresses = await self.getaddrinfo(host, port, family=0, type=socket.SOCK_STREAM, proto=0, flags=0)
        last: OSError = OSError(f"no address of {host}")
        for family, kind, protocol, _, address in addresses:
            link = original("socket", "socket")(family, kind, protocol)
            try:
                link.setblocking(False)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._keepalive:
                    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                await self.sock_connect(link, address)
            except OSError as error:
                link.close()
                last = error
            except BaseException:
                link.close()
                raise
            else:
                return link
        raise last

    def cut(self) -> None:
        """End all connections now; what was not sent yet is not waited for."""
        for transport in list(self._cuttable):
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()
        self._cuttable.clear()


class Wake:
    """One call of the loop's thread for many who want it: `on` from when it was asked for until who is called takes it
    back."""

    def __init__(self) -> None:
        self.on = False

    def ask(self, call: Callable[[], object]) -> bool:
        """From any thread: let `call` ask the loop, unless somebody has. False when it says so."""
        if self.on:
            return True
        self.on = True
        try:
            return call() is not False
        except BaseException:
            # a time limit, say: the next one asks
            self.on = False
            raise


class LoopThread:
    """Runs a loop until `stop`. Everything but `loop`'s own thread-safe calls belongs to its thread."""

    def __init__(self, *, keepalive: bool) -> None:
        self._keepalive = keepalive
        self._started = make_lock()
        self._started.acquire()
        self._tasks: set[asyncio.Task[None]] = set()
        self.ended = False
        self.loop: Loop
        start_thread(self._run)
        # made in the thread, so that what is patched belongs to it; takes a moment
        self._started.acquire()

    def _run(self) -> None:
        self.loop = Loop(keepalive=self._keepalive)
        self._started.release()
        try:
            self.loop.run_forever()
            self._cancel_all()
            self.loop.cut()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()
        finally:
            self.ended = True

    def _cancel_all(self) -> None:
        """Again and again: nats-py, and wait_for of old Pythons, swallow a cancellation now and then."""
        for _ in range(100):
            tasks = asyncio.all_tasks(self.loop)
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0.001))

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """In the loop's thread only. Its exception is logged."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Closed):
            logger.error("a task of the link failed", exc_info=error)

    def call_soon(self, callback: Callable[[], object]) -> bool:
        """From any thread; False when the loop ended."""
        try:
            if self.is_current:
                # needs no byte in its own pipe
                self.loop.call_soon(callback)
            else:
                self.loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return False
        return True

    @property
    def is_current(self) -> bool:
        return asyncio._get_running_loop() is self.loop

    def stop(self) -> None:
        """From any thread; `ended` tells when it is over."""
        self.call_soon(self.loop.stop)
