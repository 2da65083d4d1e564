"""What a server says, whole, in pieces and as nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from streambroker.engines.jetstream.words import Words


@pytest.fixture
def heard() -> list[object]:
    return []


@pytest.fixture
def words(heard: list[object]) -> Iterator[Words]:
    loop = asyncio.new_event_loop()
    yield Words(loop, lambda *message: heard.append(message), lambda *line: heard.append(line))
    loop.close()


def test_pieces_of_any_size_are_put_together(words: Words, heard: list[object]) -> None:
    said = b"PING\r\nMSG a 1 5\r\nab\r\nc\r\nHMSG b 2 r 12 14\r\nNATS/1.0\r\n\r\nhi\r\n-ERR 'no'\r\n"
    words.data_received(said)
    whole = heard.copy()
    assert len(whole) == 4
    for size in (1, 2, 7):
        heard.clear()
        for start in range(0, len(said), size):
            words.data_received(said[start:start + size])
        assert heard == whole


@pytest.mark.parametrize("said", [b"MSG a 1 -15\r\n", b"MSG a 1 -30000\r\n", b"MSG \r\n", b"MSG a 1 x\r\n"])
def test_nonsense_is_an_error_and_no_endless_work(words: Words, said: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        words.data_received(said)


def test_who_waits_for_the_end_of_what_was_read_is_called_before_an_error_too(words: Words) -> None:
    called: list[int] = []
    words._deliver = lambda *message: words.call_next(lambda: called.append(1))
    with pytest.raises(ValueError):
        words.data_received(b"MSG a 1 2\r\nhi\r\nMSG a 1 x\r\n")
    assert called == [1]
