"""Celery's other commands as a user types them: `celery status`, `celery amqp ...`, `celery beat`, `celery flower`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from integration.apps.celery_app import AppSettings
from integration.worker import ROOT
from streambroker.embedded import ServerProcess

APP = "integration.apps.celery_app"
#: several command lines in one interpreter, whose start costs most of their time
_RUN = """
import shlex, sys
from celery.bin.celery import celery
for line in sys.stdin.read().splitlines():
    try:
        celery.main(["-A", sys.argv[1], *shlex.split(line)], "celery")
    except SystemExit as end:
        code = end.code or 0
    print("\\0%s" % code, flush=True)
"""


def environment(settings: AppSettings, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """For a process that uses the test application with these settings."""
    return {**settings.environment(), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **(more or {})}


def run_celery(settings: AppSettings, *lines: str, timeout: float = 60.0) -> list[str]:
    """What each of `celery <line>` prints, both streams. AssertionError when one fails, with what it printed."""
    done = subprocess.run([sys.executable, "-c", _RUN, APP], input="\n".join(lines), text=True, timeout=timeout,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **environment(settings)})
    first, *rest = done.stdout.split("\0")
    outputs = [first]
    for number, part in enumerate(rest):
        code, _, following = part.partition("\n")
        if code != "0":
            raise AssertionError(f"celery {lines[number]} ended with {code}: {outputs[number]}")
        outputs.append(following)
    if len(outputs) != len(lines) + 1 or done.returncode:
        raise AssertionError(f"celery ended with {done.returncode} after {outputs}")
    return outputs[:-1]


def celery_process(settings: AppSettings, line: str, log: Path, ready: Callable[[], bool],
                   env: Mapping[str, str] | None = None) -> ServerProcess:
    """`celery <line>` as a process that goes on (beat, flower, events), not yet started."""
    return ServerProcess([sys.executable, "-m", "celery", "-A", APP, *shlex.split(line)], log=log, ready=ready,
                         env=environment(settings, env))
