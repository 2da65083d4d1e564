"""Celery enqueue and consume, ours against Kombu's Redis transport: rounds in turn, ratios within a round, medians.

CPU and requests a message are the figures to trust: rates move with whatever else the machine does. Each round
publishes the messages one by one, each confirmed, then starts a worker on the backlog. The first tenth of the
executions, in which the pool starts, does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from integration.bench.app import RECORD
from streambroker.testing.servers import RedisServer, wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
SYSTEMS = {"redis": ("redis://{place}/1", {}), "redis-streams": ("redis-streams://{place}/2", {}),
           "redis-streams deferred": ("redis-streams://{place}/3", {"confirm": "deferred"})}
BASE = "redis"
CONCURRENCY = {"prefork": 2, "solo": 1, "threads": 8}


def publish(count: int) -> None:
    """The measured publisher: a process of its own, prints JSON."""
    from integration.bench.app import app
    from integration.bench.app import count as task

    task.delay(-1)
    cpu, start = _own_cpu(), time.monotonic()
    for number in range(count):
        task.delay(number)
    seconds, used = time.monotonic() - start, _own_cpu() - cpu
    app.pool.force_close_all()
    print(json.dumps({"rate": count / seconds, "cpu": used / count * 1e6}))


def _own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _tree_cpu(process: psutil.Process) -> float:
    times = [each.cpu_times() for each in [process, *process.children(recursive=True)]]
    return float(sum(each.user + each.system for each in times))


def measure(server: RedisServer, system: str, pool: str, count: int) -> dict[str, float]:
    """One round of one system."""
    url, options = SYSTEMS[system]
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record")
        record.touch()
        env = {**os.environ, "PYTHONPATH": str(ROOT), "BENCH_FILE": str(record), "BENCH_OPTIONS": json.dumps(options),
               "BENCH_BROKER": url.format(place=f"127.0.0.1:{server.port}")}
        published = json.loads(subprocess.run(
            [sys.executable, "-m", "integration.bench", "--publish", str(count)], env=env, check=True,
            stdout=subprocess.PIPE).stdout)
        worker = psutil.Popen(
            [sys.executable, "-m", "celery", "-A", "integration.bench.app", "worker", "-P", pool, "-c",
             str(CONCURRENCY[pool]), "-l", "ERROR"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            def done() -> int:
                return record.stat().st_size // RECORD.size

            wait_until(lambda: done() >= count // 10, 60, "the first tenth")
            first, cpu, before, start = done(), _tree_cpu(worker), _calls(server), time.monotonic()
            wait_until(lambda: done() >= count, 300, "all messages")
            last, seconds = done(), time.monotonic() - start
            used, requests = _tree_cpu(worker) - cpu, _requests(_calls(server) - before)
        finally:
            worker.terminate()
            worker.wait(30)
        numbers = [number for number, in RECORD.iter_unpack(record.read_bytes()) if number >= 0]
        ran = last - first
        return {"enqueue/s": published["rate"], "publisher us": published["cpu"], "consume/s": ran / seconds,
                "worker us": used / ran * 1e6, "requests": requests / ran, "lost": count - len({*numbers}),
                "doubled": len(numbers) - len({*numbers})}


def _calls(server: RedisServer) -> Counter[str]:
    stats: dict[str, Any] = server.client().info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): int(row["calls"]) for name, row in stats.items()})


def _requests(calls: Counter[str]) -> int:
    """What clients sent: the server also counts the commands inside scripts, which are left out."""
    if calls["evalsha"]:
        return sum(calls[name] for name in ("evalsha", "blpop", "ping", "publish"))
    return calls.total() - calls["info"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m integration.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=1500)
    parser.add_argument("--pool", choices=list(CONCURRENCY), action="append", help="default: all three")
    parser.add_argument("--server", default="valkey", help="kind of server (default: valkey)")
    parser.add_argument("--publish", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.publish:
        publish(args.publish)
        return
    for pool in args.pool or CONCURRENCY:
        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(args.rounds):
            with RedisServer(args.server) as server:
                names = [*SYSTEMS][number % len(SYSTEMS):] + [*SYSTEMS][:number % len(SYSTEMS)]
                rounds.append({name: measure(server, name, pool, args.messages) for name in names})
                print(f"{pool}: round {number + 1} of {args.rounds}", file=sys.stderr)
        print(f"\n{pool}, {args.messages} messages, {args.rounds} rounds on {args.server}: median (ratio, min-max)\n")
        print("| transport | " + " | ".join(rounds[0][BASE]) + " |\n|---|" + "---:|" * len(rounds[0][BASE]))
        for name in SYSTEMS:
            cells = []
            for figure in rounds[0][BASE]:
                values = [each[name][figure] for each in rounds]
                text = f"{statistics.median(values):,.{2 if figure == 'requests' else 0}f}"
                if name != BASE and figure not in ("lost", "doubled"):
                    ratios = sorted(each[name][figure] / each[BASE][figure] for each in rounds)
                    text += f" ({statistics.median(ratios):.2f}, {ratios[0]:.2f}-{ratios[-1]:.2f})"
                cells.append(text)
            print(f"| {name} | " + " | ".join(cells) + " |")


main()
