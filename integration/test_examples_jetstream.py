"""The examples on NATS JetStream, run as their READMEs say."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from streambroker.embedded import ServerProcess, free_port
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import wait_until

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SHOPS = 24


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


class Workers:
    """Of one example: started, killed with all their processes, ended."""

    def __init__(self, example: str, folder: Path, environment: dict[str, str]) -> None:
        self._example = EXAMPLES / example
        self._folder = folder
        self._environment = environment
        self._processes: list[ServerProcess] = []

    def start(self, *, wait: bool = True) -> None:
        name = f"w{len(self._processes)}"
        log = self._folder / f"{name}.log"
        process = ServerProcess(
            [sys.executable, "-m", "celery", "--workdir", self._example, "-A", "app", "worker", "--concurrency", "2",
             "--hostname", f"{name}@%h", "--loglevel", "INFO"],
            log=log, ready=lambda: log.exists() and " ready." in log.read_text(), env=self._environment)
        self._processes.append(process)
        process.launch()
        if wait:
            process.wait_ready(40)

    def kill(self, index: int) -> None:
        root = psutil.Process(self._processes[index].pid)
        for process in [root, *root.children(recursive=True)]:
            process.kill()

    def close(self) -> None:
        for process in self._processes:
            process.stop()


def test_celery_jetstream_writes_its_report_though_a_worker_is_killed(server: NatsServer, tmp_path: Path) -> None:
    environment = {**os.environ, "BAKERY_SERVER": server.url(), "BAKERY_NOTES": str(tmp_path / "notes")}
    workers = Workers("celery_jetstream", tmp_path, environment)
    try:
        workers.start()
        workers.start()
        asks = subprocess.Popen([sys.executable, str(EXAMPLES / "celery_jetstream" / "make_report.py"), str(SHOPS)],
                                env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: (tmp_path / "w0.log").read_text().count("succeeded") >= 3, 40, "some tills are read")
        workers.kill(0)
        out, err = asks.communicate(timeout=100)
    finally:
        workers.close()
    assert asks.returncode == 0, err
    report = {"shops": SHOPS, "rolls": sum(100 * shop for shop in range(1, SHOPS + 1))}
    assert f"the report: {report}" in out
    assert f"once more, by its id: {report}" in out
    assert {path.name for path in (tmp_path / "notes").iterdir()} == {
        "till-7-timed-out", "till-14-timed-out", "till-21-timed-out", "report-was-written"}


class Client:
    """One request after the other, as a client of the example behaves."""

    def __init__(self, port: int) -> None:
        self._port = port
        #: statuses in order
        self.statuses: list[int] = []

    def _ask(self, method: str, path: str, body: Any = None, wait: float = 0.5) -> tuple[int, dict[str, str], Any]:
        link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            link.request(method, path, None if body is None else json.dumps(body), {"Prefer": f"wait={wait}"})
            answer = link.getresponse()
            self.statuses.append(answer.status)
            return answer.status, dict(answer.getheaders()), json.load(answer)
        finally:
            link.close()

    def quote(self, pages: int, patience: float = 90.0) -> Any:
        """The result, however often it has to ask."""
        end = time.monotonic() + patience
        status, headers, answer = self._ask("POST", "/quotes", {"pages": pages})
        while status == 503 and time.monotonic() < end:
            assert int(headers["Retry-After"]) >= 1
            time.sleep(0.2)
            status, headers, answer = self._ask("GET", headers["Location"], wait=2)
        return status, answer


def test_http_jobs_every_request_ends_in_its_result_or_a_503_and_asking_again_finds_it(
        server: NatsServer, tmp_path: Path) -> None:
    """Workers are killed under load, again and again."""
    environment = {**os.environ, "PRINTSHOP_SERVER": server.url(), "PRINTSHOP_SECONDS": "0.3"}
    port = free_port()
    log = tmp_path / "web.log"
    web = ServerProcess([sys.executable, EXAMPLES / "http_jobs" / "server.py", str(port)], log=log,
                        ready=lambda: log.exists() and "listening" in log.read_text(),
                        env={**environment, "PYTHONPATH": str(EXAMPLES.parent)})
    workers = Workers("http_jobs", tmp_path, environment)
    clients = [Client(port) for _ in range(12)]
    got: dict[int, Any] = {}
    try:
        web.start(40)
        workers.start()
        workers.start()
        assert clients[0].quote(5) == (200, {"pages": 5, "cents": 190})
        assert clients[0].quote(0) == (422, {"error": "a print job has at least one page"})

        def use(client: Client, start: int) -> None:
            for pages in range(start, start + 6):
                got[pages] = client.quote(pages)

        threads = [threading.Thread(target=use, args=(client, 100 * number))
                   for number, client in enumerate(clients, 1)]
        for thread in threads:
            thread.start()
        for victim in range(3):
            wait_until(lambda enough=15 * (victim + 1): len(got) >= enough, 60, "some answers are there")
            workers.kill(victim)
            workers.start(wait=False)
        for thread in threads:
            thread.join(120)
    finally:
        workers.close()
        web.stop()
    assert got == {pages: (200, {"pages": pages, "cents": 150 + 8 * pages})
                   for number in range(1, 13) for pages in range(100 * number, 100 * number + 6)}
    statuses = {status for client in clients for status in client.statuses}
    assert statuses == {200, 422, 503}
