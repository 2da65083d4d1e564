"""Every pool runs jobs, delayed ones too, stops when asked, and leaves nothing behind."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent", "eventlet"])
def test_every_pool_runs_jobs_and_leaves_nothing(server, at_base, celery, ledger, pool):
    celery.use(server.url())
    worker = celery.worker(pool=pool)
    for number in range(20):
        celery.send("work", f"now-{number}")
    celery.send("work", "later", countdown=1.5)
    ledger.wait("end", 21, timeout=20)
    assert worker.stop() < 10
    assert ledger.verdict().clean
    assert ledger.verdict().doubled == []
