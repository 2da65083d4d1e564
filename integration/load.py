"""Publishing all the while that something else happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def steady(rate: float, send: Callable[[int], object]) -> Iterator[None]:
    """Call `send(0)`, `send(1)`... from a thread of its own, `rate` times a second at most."""
    over = threading.Event()

    def publish() -> None:
        number = 0
        while not over.wait(1 / rate):
            send(number)
            number += 1

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
