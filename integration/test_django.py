"""A Django project that names our broker in its settings and changes nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

from integration.dramatiq_worker import ROOT, dramatiq_place
from integration.stores import Server
from streambroker.embedded import ServerProcess
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import wait_until

SEND = """
import json
from integration.apps.django_shop.tasks import ship
sent = [ship.send(1), ship.send_with_options(args=(2,), delay=300)]
got = [each.get_result(block=True, timeout=30_000) for each in sent]
print(json.dumps(got))
"""


def test_a_project_with_django_dramatiq(server: Server, prefix: str, tmp_path: Path) -> None:
    kind, url = dramatiq_place(server)
    ours = isinstance(server, NatsServer)
    given = {
        "database": str(tmp_path / "db.sqlite3"), "broker": f"streambroker.dramatiq.{kind.__name__}",
        "options": {"url": url, "prefix": prefix, "visibility_timeout": 20_000, "ack_confirm": True},
        "results": "streambroker.dramatiq.results.JetStreamBackend" if ours
                   else "dramatiq.results.backends.RedisBackend",
        "results_options": {"url": url, "prefix": prefix} if ours else {"url": url, "namespace": prefix}}
    env = {**os.environ, "SB_DJANGO": json.dumps(given),
           "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
           "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
           "DJANGO_SETTINGS_MODULE": "integration.apps.django_shop.settings"}
    django = [sys.executable, "-m", "django"]
    subprocess.run([*django, "migrate", "--verbosity", "0"], env=env, check=True, timeout=60)
    log = tmp_path / "rundramatiq.log"
    worker = ServerProcess([*django, "rundramatiq", "--processes", "1", "--threads", "1", "--path", str(ROOT)], log=log,
                           ready=lambda: "ready for action" in log.read_text(), env=env)
    worker.launch()
    try:
        worker.wait_ready(30)
        done = subprocess.run([*django, "shell", "--verbosity", "0", "--command", SEND], env=env, text=True, timeout=60,
                              stdout=subprocess.PIPE, check=True)
        assert json.loads(done.stdout) == [2, 4]
        assert "ConnectionError: no van" in log.read_text()
        os.kill(worker.pid, signal.SIGTERM)
        wait_until(lambda: not worker.alive, 20, "it ends")
        with contextlib.closing(sqlite3.connect(given["database"])) as database:
            assert database.execute("SELECT status FROM django_dramatiq_task").fetchall() == [("done",)] * 2
    finally:
        worker.stop()
