"""Taking ready messages away while unsettled ones stay: they are pulled, as a worker would, and acknowledged unseen. In
the link's thread.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ...errors import StoreConnectionError
from .frames import read_place
from .link import Frame, Reply
from .stored import ask, ask_all, get_all, subjects

if TYPE_CHECKING:
    from .engine import JetStreamEngine

#: messages in one request
BATCH = 500


async def purge_ready(engine: JetStreamEngine, queue: str, *, durable: bool) -> int:
    """Ready messages, up to `BATCH` of each step; how many. Raises StoreError, StoreConnectionError."""
    removed = 0
    for stream, consumer, subject in await _lanes(engine, queue, durable):
        if await ask(engine, f"CONSUMER.INFO.{stream}.{consumer}") is None:
            # nobody ever had one of them
            answer = await ask(engine, f"STREAM.PURGE.{stream}", {"filter": subject})
            removed += int((answer or {}).get("purged", 0))
        else:
            removed += await _take(engine, stream, consumer, BATCH)
    return removed


async def drop_oldest(engine: JetStreamEngine, queue: str, most: int, *, durable: bool) -> int:
    """So many ready messages, the oldest first; how many there were."""
    removed = 0
    while removed < most and (lanes := await _lanes(engine, queue, durable)):
        first = lanes[0]
        if len(lanes) > 1:
            heads = await get_all(engine, first[0], [{"seq": 1, "next_by_subj": subject} for _, _, subject in lanes])
            ages = [head.sequence if head else 1 << 63 for head in heads]
            first = lanes[ages.index(min(ages))]
        stream, consumer, subject = first
        if await ask(engine, f"CONSUMER.INFO.{stream}.{consumer}") is None:
            count = await _purge_first(engine, stream, subject)
        else:
            count = await _take(engine, stream, consumer, min(BATCH, most - removed) if len(lanes) == 1 else 1)
        if not count:
            break
        removed += count
    return removed


async def _lanes(engine: JetStreamEngine, queue: str, durable: bool) -> list[tuple[str, str, str]]:
    """(stream, consumer, subject) of what is not empty."""
    names = engine.names
    if not durable:
        return [(names.transient, names.transient_durable(queue), names.brief(queue, "*"))]
    stream = names.stream(queue)
    found = await subjects(engine, stream, names.ready(queue, "*"))
    return [(stream, names.durable(queue, names.step_of(subject)), subject) for subject in sorted(found)]


async def _purge_first(engine: JetStreamEngine, stream: str, subject: str) -> int:
    head, = await get_all(engine, stream, [{"seq": 1, "next_by_subj": subject}])
    if head is None:
        return 0
    answer = await ask(engine, f"STREAM.MSG.DELETE.{stream}", {"seq": head.sequence, "no_erase": True})
    return int(answer is not None)


async def _remove_books(engine: JetStreamEngine, stream: str, got: list[Reply]) -> None:
    """Of those that were delivered before."""
    placed = [place for place in map(read_place, got) if place is not None and place.raw > 1]
    await ask_all(engine, f"STREAM.PURGE.{engine.names.state}",
                  [{"filter": engine.names.book(stream, place.sequence)} for place in placed])


async def _take(engine: JetStreamEngine, stream: str, consumer: str, most: int) -> int:
    """What is ready now, up to `most`, acknowledged and confirmed."""
    inbox = engine.link.new_inbox()
    got: list[Reply] = []
    done = asyncio.Event()

    def arrived(reply: Reply) -> None:
        if reply.status == 100:
            return
        if not reply.status:
            got.append(reply)
        if reply.status or len(got) >= most:
            done.set()

    listener = await engine.link.alisten(inbox, arrived)
    try:
        request = Frame(f"{engine.api.prefix}.CONSUMER.MSG.NEXT.{stream}.{consumer}",
                        b'{"batch":%d,"no_wait":true}' % most, inbox)
        if not engine.link.post([request]):
            raise StoreConnectionError("the link broke")
        await asyncio.wait_for(done.wait(), engine.settings.socket_timeout)
    except asyncio.TimeoutError:
        raise StoreConnectionError("the store did not answer a pull in time") from None
    finally:
        listener.close()
    acks = [Frame(reply.reply, b"+ACK") for reply in got]
    if acks:
        if not engine.link.post(acks[:-1]):
            raise StoreConnectionError("the link broke")
        # what was sent before is through when this is answered
        await engine.link.ask(acks[-1], engine.settings.socket_timeout)
        await _remove_books(engine, stream, got)
    return len(got)
