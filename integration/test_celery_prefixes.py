"""Applications that share a server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from integration.base import wait_at_base
from integration.ledger import Ledger
from integration.rig import CeleryRig
from integration.stores import Server
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import wait_until


@contextmanager
def listening(rig: CeleryRig) -> Iterator[list[dict[str, Any]]]:
    """What `celery events` would hear, from the first heartbeat on."""
    heard: list[dict[str, Any]] = []
    over = threading.Event()

    def listen() -> None:
        with rig.app.connection_for_read() as connection:
            for _ in rig.app.events.Receiver(connection, handlers={"*": heard.append}).itercapture(limit=None):
                if over.is_set():
                    return

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        wait_until(lambda: heard, 10, "a heartbeat")
        yield heard
    finally:
        over.set()  # the next heartbeat ends it
        thread.join(10)


def test_applications_on_one_server_never_meet(server: Server, tmp_path: Path, prefix: str) -> None:
    """Row 40: the same queues, worker names and task ids under another prefix or in another database of a Redis: jobs,
    delays, dead letters, remote control, revokes, events and purges stay apart."""
    rigs: dict[str, CeleryRig] = {}
    for name, database, start in (("production", 0, "a"), ("staging", 0, "b"), ("database", 1, "a")):
        (tmp_path / name).mkdir()
        rig = rigs[name] = CeleryRig(tmp_path / name, Ledger(tmp_path / name / "ledger.jsonl"), prefix + start)
        if isinstance(server, NatsServer):
            rig.prefix += str(database)
            rig.use(server.url())
        else:
            rig.use(server.url(db=database))
    try:
        for rig in rigs.values():
            rig.worker("same", start=False, concurrency=1, options=["-E"]).start(wait=False)
        for rig in rigs.values():
            rig.workers[0].wait_ready()
        for name, rig in rigs.items():
            rig.send("work", f"{name}-now", task_id="now")
            rig.send("work", f"{name}-soon", countdown=1.0, task_id="soon")
            rig.send("work", f"{name}-revoked", countdown=2.0, task_id="perhaps")
            rig.send("rejecting", f"{name}-rejected", task_id="rejected")
        production = rigs["production"]
        production.app.control.revoke("perhaps")
        with listening(production) as heard:
            for rig in rigs.values():
                assert next(iter(rig.app.control.ping(timeout=3, limit=1)[0])).startswith("same@")
                assert len(rig.app.control.ping(timeout=0.7)) == 1
            for name, rig in rigs.items():
                rig.send("work", f"{name}-seen", task_id="seen")
            wait_until(lambda: ("task-succeeded", "seen") in [(event["type"], event.get("uuid")) for event in heard], 5,
                       "the event of the own job")
        assert {event["pid"] for event in heard} == {production.workers[0].pid}
        for name, rig in rigs.items():
            own = {f"{name}-{what}" for what in ("now", "soon", "rejected", "seen")}
            own |= {f"{name}-revoked"} if name != "production" else set()
            rig.ledger.wait_ids("start", own, 10)
            rig.wait_stats(ready=0, delayed=0, in_flight=0, dead=1)
            assert rig.ledger.ids("start") == own
            rig.finish()
            rig.send("work", f"{name}-left")
        assert rigs["staging"].app.control.purge() == 1
        assert [rig.stats().ready for rig in rigs.values()] == [1, 0, 1]
        for rig in rigs.values():
            rig.engine.inspector().purge("celery")
            rig.cli("dead", "purge", "-Q", "celery", "--yes")
        for rig in rigs.values():
            wait_at_base(server, rig.prefix)
    finally:
        for rig in rigs.values():
            rig.close()
