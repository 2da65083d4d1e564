"""Celery's own integration suite against our URL, one module a process as Celery's CI does.

    pip install '.[upstream]'
    python -m integration.upstream.run_celery
    python -m integration.upstream.run_celery --module test_tasks --module test_inspect
    python -m integration.upstream.run_celery --scheme redis --module test_canvas -- -k chord

All of it takes half an hour, most of that test_canvas. Exit status 1 when something failed that EXPECTED does not name.
"""

from __future__ import annotations

import sys

from integration.upstream.suite import Result, arranged, parser, print_summary, run_pytest

#: modules about other services, and which
FOREIGN = {"test_backend": "Azure Blob Storage"}
#: test -> why it cannot pass
EXPECTED: dict[str, str] = {
    "test_Inspect::test_scheduled": "messages wait for their time in the store, so no worker holds one to show",
    "test_task_replacement::test_replaced_task_nesting_level_0":
        "a race in the test: it clears its flag after publishing, when the worker may already have set it",
}


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--module", action="append", metavar="NAME", help="only this module; may be repeated")
    chosen = options.parse_args()
    results: list[Result] = []
    with arranged("celery", chosen.server) as (folder, broker, backend):
        (folder / "pytest.ini").write_text(
            "[pytest]\npython_classes = test_*\nmarkers =\n    flaky\n    timeout\n    amqp\n")
        found = {path.stem for path in (folder / "t" / "integration").glob("test_*.py")}
        names = sorted(found - FOREIGN.keys())
        if chosen.list:
            print(*names, sep="\n")
            return 0
        environment = {
            "TEST_BROKER": broker.url(chosen.scheme), "TEST_BACKEND": backend.url("redis"),
            "REDIS_HOST": backend.host, "REDIS_PORT": str(backend.port), "WORKER_LOGLEVEL": "INFO"}
        for name in chosen.module or names:
            results.append(run_pytest(name, ["-p", "celery.contrib.pytest", f"t/integration/{name}.py", *chosen.pytest],
                                      folder, environment))
            for server in (broker, backend):
                with server.client() as client:
                    client.flushall()
    return print_summary(results, EXPECTED)


if __name__ == "__main__":
    sys.exit(main())
