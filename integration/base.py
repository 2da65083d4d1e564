"""What a prefix may leave on a server when all its jobs are done and all its workers are gone."""

from __future__ import annotations

import base64
import time
from fnmatch import fnmatchcase

from streambroker.engines.jetstream.names import token
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import RedisServer

#: key pattern, size pattern: what does not grow with the number of jobs
_BOOKKEEPING = (
    ("*:{@}:server", "*"),
    ("*:{@}:[tv]:*", "*"),  # declared queues, exchanges, bindings, and their versions
    ("*:s:*", "stream of 0*"),
    ("*:bell", "list of 1"),
    ("*:gone:*", "string*"),  # a holder that was declared dead, for some minutes
    ("*:back", "string of 1"),  # until a take finds nothing
    ("*:p:*", "string*"),  # last sequence of a producer, gone after some minutes
)


def leftovers(server: RedisServer | NatsServer, prefix: str) -> list[str]:
    """Messages, unsettled deliveries, consumers, workers and delays that are still there, a line each."""
    if isinstance(server, NatsServer):
        return _nats_leftovers(server, prefix)
    return [f"db {place[0]} {place[1]}: {size}" for place, size in sorted(server.base(f"{prefix}*").keys.items())
            if not _is_bookkeeping(place[1], size)]


def _nats_leftovers(server: NatsServer, prefix: str) -> list[str]:
    """Rows of tables and the consumers of durable queues stay, and for a lease the notes that workers are dead;
    messages and consumers of transient queues do not."""
    root, lines = token(prefix), []
    for stream in server.streams():
        name = stream["name"]
        if name != root and not name.startswith(f"{root}_"):
            continue
        info = server.api(f"STREAM.INFO.{name}", {"subjects_filter": ">"})
        subjects = info.get("state", {}).get("subjects") or {}
        lines += [f"{name} {subject}: {count}" for subject, count in sorted(subjects.items())
                  if not subject.startswith(f"{root}.s.") and not _is_note_of_death(server, name, subject)]
        lines += [f"{name}/{consumer['name']}: {consumer['num_ack_pending']} unsettled"
                  for consumer in stream.get("consumer_detail") or ()
                  if name == f"{root}_tmp" or consumer["num_ack_pending"]]
    return lines


def _is_note_of_death(server: NatsServer, stream: str, subject: str) -> bool:
    if not stream.endswith("_held"):
        return False
    found = server.api(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
    return b'"gone"' in base64.b64decode(found.get("message", {}).get("data", ""))


def wait_at_base(server: RedisServer | NatsServer, prefix: str, timeout: float = 10.0) -> None:
    """Until nothing of that is there any more. AssertionError with what is, after `timeout` seconds."""
    end = time.monotonic() + timeout
    while left := leftovers(server, prefix):
        assert time.monotonic() < end, f"left on the server after {timeout} s: {left}"
        time.sleep(0.2)


def _is_bookkeeping(key: str, size: str) -> bool:
    if "consumers" in size and not size.endswith("0 pending, 0 consumers"):
        return False
    return any(fnmatchcase(key, name) and fnmatchcase(size, allowed) for name, allowed in _BOOKKEEPING)
