"""The fencing token that README names: a later start of a job has a greater one."""

from __future__ import annotations

from integration.ledger import Line
from integration.rig import CeleryRig
from integration.stores import Server


def token(start: Line) -> tuple[int, int]:
    return start.facts["retries"], start.facts["headers"].get("x-delivery-count", 1)


def test_tokens_grow_over_rejects_kills_and_retries(server: Server, celery: CeleryRig) -> None:
    celery.use(server.url(), visibility_timeout=1)
    worker = celery.worker(concurrency=1)
    celery.send("rejecting", "rejected", True, 2)
    celery.send("retrying", "retried", 2)
    celery.ledger.wait("end", 2, timeout=15)
    celery.send("hold", "killed")
    celery.ledger.wait_ids("start", ["killed"], 10)
    worker.kill()
    celery.flag("release")
    celery.worker(concurrency=1)
    celery.ledger.wait_ids("end", ["killed"], 15)

    assert [token(start) for start in celery.ledger.starts("rejected")] == [(0, 1), (0, 2), (0, 3)]
    assert [token(start) for start in celery.ledger.starts("retried")] == [(0, 1), (1, 1), (2, 1)]
    assert [token(start) for start in celery.ledger.starts("killed")] == [(0, 1), (0, 2)]
    assert [start.facts["redelivered"] for start in celery.ledger.starts("killed")] == [False, True]
