"""The live channels: what comes is read once and given to all who listen."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.live import LiveChannels
from headrace.log import encode_live
from headrace.messages import Delta

pytestmark = pytest.mark.redis


async def test_an_event_is_read_once_for_all_who_listen(pool: Any) -> None:
    channels = LiveChannels(pool.server.unix_url)
    channels.start()
    try:
        mailboxes = [channels.open("live") for _ in range(3)]
        for mailbox in mailboxes:
            assert await asyncio.wait_for(mailbox.take(), 10) is None  # it is live: now the log must be read
        events = [Delta(seq=seq, text=str(seq)) for seq in (1, 2)]
        async with pool.redis.pipeline(transaction=True) as pipe:
            for event in events:
                pipe.publish("live", encode_live(event))
            await pipe.execute()
        first, *others = [await asyncio.wait_for(mailbox.take(), 10) for mailbox in mailboxes]
        assert first == events  # both with one wake
        for other in others:
            assert [id(event) for event in other or ()] == [id(event) for event in first or ()]
    finally:
        await channels.close()


async def test_what_is_no_event_sends_to_the_log(pool: Any) -> None:
    channels = LiveChannels(pool.server.unix_url)
    channels.start()
    try:
        mailbox = channels.open("live")
        assert await asyncio.wait_for(mailbox.take(), 10) is None
        await pool.redis.publish("live", b"{}")
        assert await asyncio.wait_for(mailbox.take(), 10) is None
    finally:
        await channels.close()
