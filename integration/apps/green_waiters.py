"""A program full of greenlets that wait for results: `python -m integration.apps.green_waiters gevent 100`.

Publishes that many tasks, waits for each in a greenlet of its own, and prints as JSON what came, how evenly another
greenlet ran meanwhile, how many files it had open, and what a callback by `then` got.
"""

from __future__ import annotations

import sys

if sys.argv[1] == "gevent":
    from gevent import monkey

    monkey.patch_all()
else:
    import eventlet

    eventlet.monkey_patch()

import json
import os
import threading
import time

from celery.exceptions import TimeoutError

from integration.apps.celery_app import app


def main() -> None:
    """Threads are greenlets here."""
    count = int(sys.argv[2])
    echo = app.signature("echo")
    then: list[object] = []
    attended = echo.clone(args=("then",)).delay()
    attended.then(lambda result: then.append(result.result))
    got: list[object] = []
    late: list[str] = []

    def wait(number: int) -> None:
        got.append(echo.clone(args=(number, 1.0 if number == count - 1 else 0.2)).delay().get(timeout=60))

    def wait_in_vain() -> None:
        try:
            app.AsyncResult("nobody publishes this").get(timeout=0.5)
        except TimeoutError:
            late.append("late")

    waiters = [threading.Thread(target=wait, args=(number,)) for number in range(count)]
    waiters.append(threading.Thread(target=wait_in_vain))
    for waiter in waiters:
        waiter.start()
    worst, files = 0.0, 0
    while any(waiter.is_alive() for waiter in waiters):
        before = time.monotonic()
        time.sleep(0.01)
        worst = max(worst, time.monotonic() - before)
        files = max(files, len(os.listdir("/dev/fd")))
    for waiter in waiters:
        waiter.join()
    while not then:
        time.sleep(0.01)
    print(json.dumps({"got": sorted(got), "worst": worst, "late": late, "then": then, "files": files}))  # noqa: T201


if __name__ == "__main__":
    main()
