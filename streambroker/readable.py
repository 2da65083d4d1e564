"""Waiting for file descriptors. `poll` where there is one: other than a selector it needs no descriptor of its own."""

from __future__ import annotations

import math
import select
from collections.abc import Iterable
from typing import Any

from .real import original


def wait_readable(fds: Iterable[int], timeout: float | None, *, real: bool = False) -> set[int]:
    """Which of `fds` are readable, or closed, within `timeout` seconds; negative ones count as closed. Where gevent or
    eventlet has patched `select` other greenlets run meanwhile; `real`: it blocks the OS thread there too."""
    wait = None if timeout is None else max(0.0, timeout)
    known = {*fds}
    closed = {fd for fd in known if fd < 0}
    if closed:
        return closed
    if hasattr(select, "poll"):
        poll: Any = (original("select", "poll") if real else select.poll)()
        for fd in known:
            poll.register(fd, select.POLLIN)
        return {fd for fd, _ in poll.poll(wait if wait is None else math.ceil(wait * 1000))}
    waiter: Any = original("select", "select") if real else select.select
    readable, _, _ = waiter(list(known), [], [], wait)
    return {*readable}
