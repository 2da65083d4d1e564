"""README's least-privilege user is enough for all that workers, publishers and tools do."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from streambroker.cli import main
from streambroker.testing.servers import RedisServer, wait_until

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
RULE = re.findall(r"^ACL SETUSER jobs ([^`]*)$", README, re.MULTILINE)


def refusals(server: RedisServer) -> list[str]:
    """What the server refused to its users, the courtesy of redis-py on connecting excepted."""
    with server.client() as client:
        entries: list[Any] = client.acl_log()
    return [f"{entry['reason']} {entry['object']}" for entry in entries
            if not entry["object"].startswith("client")]


@pytest.fixture
def guarded(fresh) -> RedisServer:
    (rule,) = RULE
    server = fresh()
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "jobs", *shlex.split(rule.replace("\\\n", " ")))
    return server


def test_the_documented_user_is_enough(guarded, celery, ledger):
    url = guarded.url(user="jobs", password="secret")
    celery.use(url, global_keyprefix="sb", visibility_timeout=3)
    worker, other = celery.worker(), celery.worker()
    for number in range(20):
        celery.send("work", f"now-{number}")
    celery.send("work", "later", countdown=2)
    celery.send("rejecting", "refused")
    revoked = celery.send("work", "revoked", countdown=60)
    celery.app.control.revoke(revoked.id)
    assert len(celery.app.control.ping(timeout=3)) == 2
    ledger.wait("end", 21, timeout=20)
    celery.send("hold", "held")
    ledger.wait_ids("start", ["held"], 10)
    (start,) = ledger.starts("held")
    victim, left = (worker, other) if start.worker == worker.name else (other, worker)
    victim.kill()
    wait_until(lambda: len(ledger.starts("held")) == 2, 15, "the held job starts again")
    celery.flag("release")
    ledger.wait_ids("end", ["held"], 10)
    for command in (["queues", "--all", "--deliveries"], ["workers"], ["dead", "ls"], ["delayed", "ls"],
                    ["dead", "replay", "-Q", "celery", "--yes"], ["purge", "-Q", "celery", "--yes"],
                    ["dead", "purge", "-Q", "celery", "--yes"]):
        assert main([*command, "--url", url]) == 0, command
    left.stop(signal.SIGTERM)
    assert refusals(guarded) == []


def test_it_reaches_nothing_else(guarded):
    with guarded.client(username="jobs", password="secret") as client:
        for command in (["GET", "other"], ["FLUSHALL"], ["KEYS", "*"], ["CONFIG", "GET", "*"], ["CLIENT", "LIST"]):
            with pytest.raises(Exception, match=r"(?i)no permission"):
                client.execute_command(*command)
