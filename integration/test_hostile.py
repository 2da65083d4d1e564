"""Thousands of inputs that nobody should send: workers live, neighbours run, and each bad one ends as what it may."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dramatiq import Message as Job
from kombu import Connection, Producer, Queue
from kombu.exceptions import KombuError

from integration.dramatiq_worker import DramatiqRig
from integration.hostile import (
    DEAD,
    GONE,
    Input,
    celery_calls,
    celery_inputs,
    dramatiq_calls,
    dramatiq_inputs,
    names,
    put,
)
from integration.ledger import Ledger
from integration.rig import CeleryRig
from integration.stores import Server
from streambroker.engine import Inspector
from streambroker.errors import StoreError
from streambroker.testing.natsserver import NatsServer

pytestmark = pytest.mark.stores

SEED = 20
#: bad ones between two good ones
GAP = 10
FEW, MANY = 300, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])


def settled(inspector: Inspector, queue: str) -> None:
    """Wait until nothing is left but what waits for a time that is far away."""
    def left() -> list[str]:
        stats = inspector.stats(queue)
        soon = [f"{each.message.id} in {each.due - time.time():.1f} s" for each in inspector.delayed(queue)
                if each.due < time.time() + 60] if stats.delayed else []
        running = [f"{each.id} for {each.age:.1f} s" for each in inspector.in_flight(queue)] if stats.in_flight else []
        return [f"{stats.ready} ready", *running, *soon] if stats.ready or running or soon else []

    end = time.monotonic() + 30
    while found := left():
        assert time.monotonic() < end, found[:20]
        time.sleep(0.2)


def judge(inputs: Iterable[Input], inspector: Inspector, queue: str, ledger: Ledger, failed: Collection[str] = ()
          ) -> None:
    """Each that must be a dead letter is one; of the others none is lost without having asked for it. `failed` are
    those that ran and raised, which counts as done."""
    dead = inspector.dead(queue)
    reasons: Counter[str] = Counter()
    buried: Counter[str] = Counter()
    for letter in dead:
        reasons[letter.reason.partition(":")[0][:40]] += 1
        buried[letter.message.id] += 1
    waits = {each.message.id for each in inspector.delayed(queue)}
    ran = ledger.ids("end")
    inputs = list(inputs)
    lost = [each for each in inputs if each.message is not None and each.name not in ran and each.name not in failed
            and not buried[each.name] and each.name not in waits and GONE not in each.ends]
    wrong = [each for each in inputs if each.message is not None and each.ends == {DEAD} and each.name in ran]
    assert not lost, [(each.name, each.what) for each in lost][:20]
    assert not wrong, [(each.name, each.what) for each in wrong]
    raw = sum(each.ends == {DEAD} and each.message is None for each in inputs)
    assert buried[""] >= raw, reasons


def mixed(inputs: list[Input], put_bad: Callable[[list[Input]], None], send: Callable[[str], object]) -> list[str]:
    """Some bad ones, a good one, and so on; the good ones' names."""
    good = []
    for start in range(0, len(inputs), GAP):
        put_bad(inputs[start:start + GAP])
        good.append(f"good-{start}")
        send(good[-1])
    return good


@pytest.mark.parametrize("count", [FEW, MANY])
def test_a_celery_worker(server: Server, celery: CeleryRig, count: int) -> None:
    celery.use(server.url())
    worker = celery.worker(pool="prefork", concurrency=2, start=False,
                           options=["--without-mingle", "--without-gossip"]).start(wait=False)
    celery.send("work", "first")
    inputs = list(celery_inputs(SEED, count, isinstance(server, NatsServer)))
    good = mixed(inputs, lambda some: put(server, celery.prefix, "celery", some),
                 lambda name: celery.send("work", name))
    # no place of the pool is lost
    good += celery.send_all("work", [f"last-{number}" for number in range(20)], 0.05)
    celery.ledger.wait_ids("end", good, 20 + count / 50)
    settled(celery.engine.inspector(), "celery")
    assert worker.alive
    assert worker.count(r"ready\.") == 1
    failed = set(re.findall(r"Task work\[(bad-\d+-\d+)\] raised unexpected", worker.text()))
    judge(inputs, celery.engine.inspector(), "celery", celery.ledger, failed)


@pytest.mark.parametrize("count", [FEW, MANY])
def test_a_dramatiq_worker(server: Server, tmp_path: Path, ledger: Ledger, prefix: str, count: int) -> None:
    rig = DramatiqRig(server, tmp_path, ledger, prefix)
    try:
        command = rig.command(threads=2)
        inputs = list(dramatiq_inputs(SEED, count, isinstance(server, NatsServer)))
        good = mixed(inputs, lambda some: put(server, prefix, "default", some), lambda name: rig.send("work", name))
        rig.wait("end", *good, seconds=20 + count / 50)
        settled(rig.broker.engine.inspector(), "default")
        assert command.alive
        assert command.log.read_text().count("ready for action") == 1
        judge(inputs, rig.broker.engine.inspector(), "default", ledger)
    finally:
        rig.close()


# ---------------------------------------------------------------- through the publishers

def told(send: Callable[[], object]) -> str:
    """Sends; what is wrong, or nothing. What is raised is a refusal of this call, with words."""
    try:
        send()
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, StoreError,
            KombuError) as error:
        assert str(error), repr(error)
        return str(error)
    return ""


@pytest.mark.parametrize("count", [FEW, MANY])
def test_celery_programs(server: Server, celery: CeleryRig, count: int) -> None:
    """Who asks for nonsense is told so at once, or it ends like any other job."""
    celery.use(server.url())
    worker = celery.worker(pool="threads", concurrency=4, start=False,
                           options=["--without-mingle", "--without-gossip"]).start(wait=False)
    accepted: dict[str, tuple[str, str]] = {}

    def call(name: str, what: str, arguments: list[Any], options: dict[str, Any]) -> None:
        accepted[name] = str(celery.app.tasks["work"].apply_async(arguments, **options).id), what

    for each in celery_calls(SEED, count):
        told(partial(call, *each))
        if not len(accepted) % GAP:
            celery.send("work", f"good-{each[0]}")
    assert count / 4 < len(accepted) < count
    celery.ledger.wait_ids("end", celery.ledger.ids("published"), 20 + count / 50)
    settled(celery.engine.inspector(), "celery")
    assert worker.alive
    assert worker.count(r"ready\.") == 1
    inspector, text = celery.engine.inspector(), worker.text()
    kept = " ".join(each.message.body.decode(errors="replace")
                    for each in (*inspector.dead("celery"), *inspector.delayed("celery")))
    ended = {*celery.ledger.ids("end"), *re.findall(r"call-\d+-\d+", kept)}
    # a task that raises counts as done, one that has expired is discarded
    told_of = set(re.findall(r"Task work\[(.*?)\] raised unexpected|Discarding revoked task: work\[(.*?)\]", text))
    ids = {found for pair in told_of for found in pair}
    assert {name: what for name, (task, what) in accepted.items() if name not in ended and task not in ids} == {}


@pytest.mark.parametrize("count", [FEW, MANY])
def test_dramatiq_programs(server: Server, tmp_path: Path, ledger: Ledger, prefix: str, count: int) -> None:
    rig = DramatiqRig(server, tmp_path, ledger, prefix)
    try:
        command = rig.command(threads=4)
        accepted, good = 0, []
        for name, _, fields, delay in dramatiq_calls(SEED, count):
            accepted += not told(lambda fields=fields, delay=delay: rig.broker.enqueue(Job(**fields), delay=delay))
            if not accepted % GAP:
                good.append(f"good-{name}")
                rig.send("work", good[-1])
        assert count / 5 < accepted < count
        rig.wait("end", *good, seconds=20 + count / 50)
        settled(rig.broker.engine.inspector(), "default")
        assert command.alive
        assert command.log.read_text().count("ready for action") == 1
    finally:
        rig.close()


@pytest.mark.parametrize("count", [60, pytest.param(600, marks=pytest.mark.long)])
def test_queues_of_any_name(server: Server, prefix: str, count: int) -> None:
    """Each is a queue of its own, or whoever names it is told."""
    queues = names(SEED, count)
    with Connection(server.url(), transport_options={"global_keyprefix": prefix}) as connection:
        channel = connection.channel()
        refused = {queue for queue in queues if told(lambda queue=queue: (
            Queue(queue)(channel).declare(), Producer(channel).publish(queue.encode("utf-8", "surrogatepass"),
                                                                     routing_key=queue)))}
        assert len(refused) < count / 2
        for queue in queues:
            if queue not in refused:
                message = channel.basic_get(queue, no_ack=True)
                assert message is not None and message.body == queue.encode("utf-8", "surrogatepass"), queue
                assert channel.basic_get(queue, no_ack=True) is None
