"""The table at the end of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from integration import ledger
from integration.tally import Report, Tally
from streambroker.testing import faults


def run(report: Report, path: str, name: str, fails: bool = False, **parameters: str) -> None:
    """A test that makes two faults and has a ledger judged."""
    item: Any = SimpleNamespace(path=SimpleNamespace(parts=path.split("/")), nodeid=f"{path}::{name}", fixturenames=[],
                                callspec=SimpleNamespace(params=parameters))
    report.pytest_runtest_setup()
    call = report.pytest_runtest_call(item)
    next(call)
    faults.done["cut"] += 2
    ledger.judged[Path("ledger")] = ledger.Verdict(5, 4, ["lost"], [], [], [], [], [])
    if fails:
        with pytest.raises(AssertionError):
            call.throw(AssertionError())
    else:
        with pytest.raises(StopIteration):
            next(call)


def test_a_row_for_each_server_and_framework_of_all_processes() -> None:
    own, other = Report(Tally({"valkey": "valkey 9"})), Report(Tally({"nats": "nats 2"}))
    run(own, "integration/test_celery_x.py", "test_a", kind="valkey")
    run(own, "integration/test_celery_x.py", "test_b", kind="valkey", fails=True)
    run(own, "integration/test_seam.py", "test_c")
    run(own, "tests/test_x.py", "test_of_no_server", kind="valkey")
    run(other, "integration/test_dramatiq_x.py", "test_d", kind="nats")
    output: dict[str, Any] = {}
    other.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace(workeroutput=output)))  # type: ignore[arg-type]
    own.pytest_testnodedown(SimpleNamespace(workeroutput=output))
    assert list(own.tally.lines())[2:] == [
        "| nats 2 | Dramatiq | 1 | 2 | 5 | 1 |",
        "| of the test's own | none | 1 | 2 | 5 | 1 |",
        "| valkey 9 | Celery | 1 | 4 | 10 | 2 |"]


def test_no_table_without_rows() -> None:
    assert list(Tally({"valkey": "valkey 9"}).lines()) == []
