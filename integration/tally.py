"""What a run of the tests has shown, as a table: on which store, with which framework, against how many faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from integration import ledger
from streambroker.testing import faults

#: of a test that makes its servers by itself: clusters, groups, several kinds
_OWN = "of the test's own"


@dataclass
class Tally:
    """`servers`: what was used, by kind. `rows`, by kind and framework: tests that passed, faults that these made (a
    store, a worker or a link that was killed, stopped, frozen, cut, held, ...), jobs whose fate a ledger outside of the
    store has judged, and how many of them were lost."""

    servers: dict[str, str] = field(default_factory=dict)
    rows: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)

    def add(self, kind: str, framework: str, counts: Counter[str]) -> None:
        self.rows.setdefault((kind, framework), Counter()).update(counts)

    def lines(self) -> Iterable[str]:
        """The table."""
        if self.rows:
            yield "| server | framework | tests | faults | jobs judged | lost |"
            yield "| --- | --- | ---: | ---: | ---: | ---: |"
        for server, framework, counts in sorted((self.servers.get(kind, kind), framework, counts)
                                                for (kind, framework), counts in self.rows.items()):
            numbers = " | ".join(str(counts[name]) for name in ("tests", "faults", "jobs", "lost"))
            yield f"| {server} | {framework} | {numbers} |"


TALLY = pytest.StashKey[Tally]()


class Report:
    """A plugin of pytest that fills a tally, also with those of the worker processes of pytest-xdist."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._before = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """What the ending of a test does to its workers is none of its faults."""
        self._before = faults.done.total()
        ledger.judged.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        if "integration" not in item.path.parts:
            return (yield)
        passed = False
        try:
            result = yield
            passed = True
            return result
        finally:
            judged = ledger.judged.values()
            self.tally.add(self._kind(item), _framework(item), Counter(
                tests=int(passed), faults=faults.done.total() - self._before,
                jobs=sum(each.published for each in judged), lost=sum(len(each.lost) for each in judged)))

    def _kind(self, item: pytest.Item) -> str:
        """Of the server that the test is told to use."""
        parameters = getattr(item, "callspec", None)
        named = parameters.params if parameters else {}
        for name in ("kind", "every_kind", "every_nats_kind"):
            if str(named.get(name)) in self.tally.servers:
                return str(named[name])
        return "valkey" if "valkey" in getattr(item, "fixturenames", ()) else _OWN

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["tally"] = self.tally.servers, [[*key, dict(counts)] for key, counts in self.tally.rows.items()]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        servers, rows = getattr(node, "workeroutput", {}).get("tally", ({}, []))
        self.tally.servers.update(servers)
        for kind, framework, counts in rows:
            self.tally.add(kind, framework, Counter(counts))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self.tally.lines():
            terminalreporter.write_line(line)
        used = ", ".join(sorted(self.tally.servers.values())) or "none"
        terminalreporter.write_line(f"servers used: {used}")


def _framework(item: pytest.Item) -> str:
    """By the test's own name, its module's first: some modules are about both."""
    names = item.nodeid.lower() + " ".join(getattr(item, "fixturenames", ()))
    if "dramatiq" in names:
        return "Dramatiq"
    return "Celery" if "celery" in names or "kombu" in names else "none"
