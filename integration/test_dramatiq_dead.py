"""What Dramatiq gave up, seen and handled by an operator."""

from __future__ import annotations

import json

import dramatiq
import pytest

from integration.dramatiq_worker import dramatiq_place
from integration.stores import Server
from integration.test_cli import cli
from tests.dramatiq_rig import take, until, working

pytestmark = pytest.mark.stores


def test_dead_letters_on_the_command_line(server: Server, prefix: str) -> None:
    kind, url = dramatiq_place(server)
    broker = kind(url=url, prefix=prefix)
    ran: list[int] = []

    @dramatiq.actor(broker=broker, max_retries=1, min_backoff=10, max_backoff=10)
    def charge(card: int) -> None:
        ran.append(card)
        raise KeyError("no such card")

    sent = [charge.send(number) for number in range(5)]
    with working(broker):
        until(lambda: broker.get_queue_message_counts("default") == (0, 0, 5))
    assert len(ran) == 10

    store = ["--url", url, "--prefix", prefix]
    listed = json.loads(cli("dead", "ls", "-Q", "default", "--json", *store))
    assert {each["message_id"] for each in listed} == {each.message_id for each in sent}
    assert {(each["type"], each["reason"], each["delivery_count"]) for each in listed} == {
        ("charge", "KeyError: 'no such card'", 1)}
    assert all(each["holder"] and each["first"] <= each["last"] for each in listed)
    shown = cli("dead", "show", "-Q", "default", sent[0].message_id, *store)
    for text in ("charge", "KeyError: 'no such card'", '"retries": 2', "Traceback (most recent call last):",
                 '    raise KeyError("no such card")'.replace('"', '\\"')):
        assert text in shown

    assert "replayed 2" in cli("dead", "replay", "-Q", "default", "--yes", *store,
                               *(each.message_id for each in sent[:2]))
    consumer = broker.consume("default", prefetch=5, timeout=100)
    again = take(consumer, 2)
    assert {each.message_id for each in again} == {each.message_id for each in sent[:2]}
    assert [(each.options, each.delivery_count) for each in again] == [({"retries": 0}, 1)] * 2
    for each in again:
        consumer.ack(each)
    assert "removed 1" in cli("dead", "rm", "-Q", "default", sent[2].message_id, "--yes", *store)
    assert "removed 2" in cli("dead", "purge", "-Q", "default", "--yes", *store)
    until(lambda: broker.get_queue_message_counts("default") == (0, 0, 0))
    broker.close()
