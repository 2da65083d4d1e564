"""Messages and deliveries."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from streambroker.message import DeadLetter, Delivery, Message, QueueSpec, QueueStats


@pytest.mark.parametrize(("head", "headers"), [
    (b'{"type": "t", "n": 1}', {"type": "t", "n": 1}), (b"{}", {}), (b"", {}), (b"[1]", {}), (b"null", {}),
    (b"\xff\xfe", {}), (b'{"a":', {}), ('{"é": "ü"}'.encode(), {"é": "ü"}),
])
def test_headers(head: bytes, headers: dict[str, Any]) -> None:
    assert Message(b"", head=head).headers == headers


def test_a_message_needs_a_body_alone() -> None:
    message = Message(b"x")
    assert (message.head, message.id, message.priority, message.delay, message.expires) == (b"{}", "", 0, 0.0, None)


@pytest.mark.parametrize(("value", "field"), [
    (Message(b"x"), "body"), (QueueSpec("q"), "name"), (QueueStats("q", 0, 0, 0, 0), "ready")])
def test_values_are_frozen(value: Any, field: str) -> None:
    with pytest.raises(AttributeError):
        setattr(value, field, None)
    with pytest.raises((AttributeError, TypeError)):
        value.unknown = 1


def test_values_are_compared_by_content() -> None:
    assert Message(b"x", id="a") == Message(b"x", id="a")
    assert QueueSpec("q", arguments={"x": 1}) != QueueSpec("q")


def test_the_token_orders_hand_overs() -> None:
    first = Delivery("q", "5-0", Message(b""), count=1)
    second = Delivery("q", "5-0", Message(b""), count=2, redelivered=True)
    assert first.token == ("5-0", 1)
    assert first.token < second.token


def test_deliveries_are_known_by_identity() -> None:
    """Two hand-overs of one message must not be mixed up."""
    first, second = (Delivery("q", "5-0", Message(b"")) for _ in range(2))
    assert first != second
    assert len({first, second}) == 2


def test_the_way_back_is_not_shown() -> None:
    assert "place" not in repr(Delivery("q", "5-0", Message(b""), place=object()))


def test_messages_travel_between_processes() -> None:
    letter = DeadLetter("q", "1", Message(b"\x00", id="a"), "why", 3, 1.0, 2.0, "h", {"k": b"v"})
    assert pickle.loads(pickle.dumps(letter)) == letter
