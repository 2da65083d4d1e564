"""Celery's own integration suite against our URL, one module a process as Celery's CI does.

    pip install '.[upstream]'
    python -m integration.upstream.run_celery
    python -m integration.upstream.run_celery --module test_tasks --module test_inspect
    python -m integration.upstream.run_celery --scheme redis --module test_canvas -- -k chord
    python -m integration.upstream.run_celery --scheme jetstream --results jetstream

Whatever the scheme, the suite's tasks count and echo by a Redis server of their own, which is no broker then. Tests
that are skipped unless results are in Redis run with results in JetStream too.

All of it takes half an hour, most of that test_canvas. Exit status 1 when something failed that EXPECTED does not name.
"""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from pathlib import Path

from integration.upstream.suite import Result, arranged, parser, print_summary, run_pytest
from streambroker.testing.natsserver import NatsServer

#: modules about other services, and which
FOREIGN = {"test_backend": "Azure Blob Storage"}
#: test -> why it cannot pass
EXPECTED: dict[str, str] = {
    "test_Inspect::test_scheduled": "messages wait for their time in the store, so no worker holds one to show",
    "test_task_replacement::test_replaced_task_nesting_level_0":
        "a race in the test: it clears its flag after publishing, when the worker may already have set it",
}


#: the same, with results in JetStream
WITH_RESULTS: dict[str, str] = {
    "test_task_redis_result_backend::test_asyncresult_forget_cancels_subscription": "looks at channels of Redis",
    "test_task_redis_result_backend::test_asyncresult_get_cancels_subscription": "looks at channels of Redis",
    "test_redis_backend::test_failure_expires": "asks Redis through its client how long keys live",
    "test_redis_backend::test_chord_expires": "asks Redis through its client how long keys live",
    "test_chord::test_chord_on_error": "looks for the parts of a chord in keys of Redis",
    "test_chord::test_error_propagates_from_chord": "an issue of Celery's (6437), marked so for results in Redis",
    "test_chain::test_chord_header_id_duplicated_on_rabbitmq_msg_duplication[redis-group-ids]":
        "a message that is published twice by a trick that works with RabbitMQ; marked so for Redis as a broker",
}
_FOR_REDIS_ONLY = re.compile(r"""result_backend\.startswith\((['"])redis\1\)""")


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--module", action="append", metavar="NAME", help="only this module; may be repeated")
    options.add_argument("--results", default="redis", choices=("redis", "jetstream"), help="where results are")
    options.add_argument("--nats", default="nats", metavar="KIND", help="see streambroker.testing.natsserver")
    chosen = options.parse_args()
    results: list[Result] = []
    with arranged("celery", chosen.server) as (folder, broker, backend):
        (folder / "pytest.ini").write_text(
            "[pytest]\npython_classes = test_*\nmarkers =\n    flaky\n    timeout\n    amqp\n")
        tests = folder / "t" / "integration"
        names = sorted({path.stem for path in tests.glob("test_*.py")} - FOREIGN.keys())
        if chosen.list:
            print(*names, sep="\n")
            return 0
        if chosen.results != "redis":
            _allow(tests, chosen.results)
        environment = {
            "TEST_BROKER": broker.url(chosen.scheme), "TEST_BACKEND": backend.url("redis"),
            "REDIS_HOST": backend.host, "REDIS_PORT": str(backend.port), "WORKER_LOGLEVEL": "INFO"}
        for name in chosen.module or names:
            with ExitStack() as stack:
                if "jetstream" in (chosen.scheme, chosen.results):
                    nats = stack.enter_context(NatsServer(chosen.nats))
                    environment |= {"TEST_BROKER": nats.url()} if chosen.scheme == "jetstream" else {}
                    environment |= {"TEST_BACKEND": nats.url()} if chosen.results == "jetstream" else {}
                results.append(run_pytest(
                    name, ["-p", "celery.contrib.pytest", f"t/integration/{name}.py", *chosen.pytest], folder,
                    environment))
            for server in (broker, backend):
                with server.client() as client:
                    client.flushall()
    return print_summary(results, {**EXPECTED, **(WITH_RESULTS if chosen.results == "jetstream" else {})})


def _allow(tests: Path, results: str) -> None:
    """Tests ask for Redis where they mean a backend with native joins and chords of its own."""
    for path in tests.glob("*.py"):
        path.write_text(_FOR_REDIS_ONLY.sub(f"result_backend.startswith(('redis', '{results}'))", path.read_text()))


if __name__ == "__main__":
    sys.exit(main())
