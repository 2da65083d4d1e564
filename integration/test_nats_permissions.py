"""A user of nats-server with no more than the permissions that README names can do everything, and nothing else."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator

import nats
import pytest

from integration.rig import CeleryRig
from integration.test_acl import day_of_a_producer, day_of_an_operator, day_of_workers, rest_of_the_engine
from integration.worker import ROOT
from streambroker.testing.natsserver import NatsServer

USER, PASSWORD = "jobs", "secret"
DENIED = " Violation - "


def documented_user() -> str:
    """README's block, as it is."""
    readme = (ROOT / "README.md").read_text()
    [block] = re.findall(r"^```\n(authorization \{.*?)^```", readme, re.DOTALL | re.MULTILINE)
    return str(block)


@pytest.fixture
def guarded() -> Iterator[NatsServer]:
    server = NatsServer(config=documented_user())
    try:
        yield server.start()
    finally:
        server.close()


def denials(server: NatsServer) -> list[str]:
    return [line for line in (server.directory / "server.log").read_text().splitlines() if DENIED in line]


def test_the_documented_user_can_do_everything(guarded: NatsServer, plain_celery: CeleryRig) -> None:
    celery, url = plain_celery, guarded.url(user=USER, password=PASSWORD)
    celery.use(url, backend=url, arguments={"with-dlx": {"x-dead-letter-exchange": "",
                                                         "x-dead-letter-routing-key": "graves"}},
               queues=["celery", "with-dlx", "graves-keeper"])
    day_of_a_producer(url)
    day_of_workers(celery)
    day_of_an_operator(celery, url)
    rest_of_the_engine(url)
    assert denials(guarded) == []


def test_the_documented_user_can_do_nothing_else(guarded: NatsServer) -> None:
    subjects = ["sb2.q.celery.0", "orders", "$JS.API.STREAM.DELETE.orders", "$JS.API.STREAM.CREATE.orders",
                "$JS.API.STREAM.MSG.GET.sb2", "$JS.API.CONSUMER.MSG.NEXT.orders.all", "$JS.ACK.orders.all.1.1.1.1.1"]
    refused: list[str] = []
    told = threading.Event()

    async def attempt() -> None:
        async def note(error: Exception) -> None:
            refused.append(str(error).lower())
            if len(refused) == len(subjects):
                told.set()

        client = await nats.connect(guarded.url("nats", user=USER, password=PASSWORD), error_cb=note)
        for subject in subjects:
            await client.publish(subject, b"")
        await client.flush()
        await asyncio.to_thread(told.wait, 5)
        await client.close()

    asyncio.run(attempt())
    assert len(refused) == len(subjects)
    assert all(f'publish to "{subject.lower()}"' in each for subject, each in zip(subjects, refused, strict=True))
    assert len(denials(guarded)) == len(subjects)
