"""Kombu's integration base classes, message expiry and priorities included, against our URL.

    python -m integration.upstream.run_kombu
    python -m integration.upstream.run_kombu --module test_priority --scheme redis

Exit status 1 when something failed that EXPECTED does not name.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from integration.upstream.suite import arranged, parser, print_summary, run_pytest
from streambroker.embedded import free_port

#: test -> why it cannot pass
EXPECTED: dict[str, str] = {}
SUITE = Path(__file__).with_name("kombu_suite.py")


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--module", action="append", metavar="CLASS", help="only this class; may be repeated")
    chosen = options.parse_args()
    names = re.findall(r"^class (test_\w+)", SUITE.read_text(), re.MULTILINE)
    if chosen.list:
        print(*names, sep="\n")
        return 0
    with arranged("kombu", chosen.server) as (folder, broker, _):
        (folder / "pytest.ini").write_text("[pytest]\npython_classes = test_*\npython_files = kombu_suite.py\n")
        shutil.copy(SUITE, folder)
        environment = {"TEST_BROKER": broker.url(chosen.scheme),
                       "TEST_BROKER_DEAD": broker.url(chosen.scheme, port=free_port())}
        results = [run_pytest(name, [f"kombu_suite.py::{name}", *chosen.pytest], folder, environment)
                   for name in chosen.module or names]
    return print_summary(results, EXPECTED)


if __name__ == "__main__":
    sys.exit(main())
