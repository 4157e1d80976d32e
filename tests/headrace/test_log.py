"""The bytes of events, as other programs read them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError
from headrace.log import decode_fields, decode_live, encode_fields, encode_live
from headrace.messages import Delta, End, Event, Finish, TokenLogprob, Usage

USAGE = Usage(prompt_tokens=3, completion_tokens=2, total_tokens=5)
LP = b'[{"id":9,"lp":-0.5,"b":[195,169]}]'
USAGE_JSON = b'{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"cached_tokens":0}'
ERROR_JSON = b'{"code":"too_large","message":"No.","retryable":false,"field":"body"}'
GOLDEN: list[tuple[Event, list[Any], bytes]] = [
    (
        Delta(seq=1, text="é\n", ids=[7, 8]),
        ["type", "delta", "text", "é\n", "ids", b"[7,8]"],
        '{"type":"delta","seq":1,"text":"é\\n","ids":[7,8]}'.encode(),
    ),
    (
        Delta(seq=2, i=3, ids=[9], cached=16, lp=[TokenLogprob(id=9, lp=-0.5, b=[195, 169])]),
        ["type", "delta", "text", "", "ids", b"[9]", "i", 3, "cached", 16, "lp", LP],
        b'{"type":"delta","seq":2,"i":3,"ids":[9],"lp":' + LP + b',"cached":16}',
    ),
    (
        Finish(seq=3, reason="stop", stop="\n\n"),
        ["type", "finish", "i", 0, "reason", "stop", "stop", b'"\\n\\n"'],
        b'{"type":"finish","seq":3,"reason":"stop","stop":"\\n\\n"}',
    ),
    (
        Finish(seq=3, i=1, reason="length"),
        ["type", "finish", "i", 1, "reason", "length"],
        b'{"type":"finish","seq":3,"i":1,"reason":"length"}',
    ),
    (
        End(seq=4, status="done", usage=USAGE),
        ["type", "end", "status", "done", "usage", USAGE_JSON],
        b'{"type":"end","seq":4,"status":"done","usage":' + USAGE_JSON + b"}",
    ),
    (
        End(seq=1, status="failed", error=HeadraceError("too_large", "No.", "body").to_wire()),
        ["type", "end", "status", "failed", "error", ERROR_JSON],
        b'{"type":"end","seq":1,"status":"failed","error":' + ERROR_JSON + b"}",
    ),
]


@pytest.mark.parametrize(("event", "fields", "live"), GOLDEN)
def test_golden_bytes(event: Event, fields: list[Any], live: bytes) -> None:
    assert encode_fields(event) == fields
    assert encode_live(event) == live


def stored(event: Event) -> tuple[bytes, dict[bytes, bytes]]:
    flat = [v if isinstance(v, bytes) else str(v).encode() for v in encode_fields(event)]
    return f"{event.seq}-0".encode(), dict(zip(flat[::2], flat[1::2], strict=True))


texts = st.text(st.characters(codec="utf-8"), max_size=20)
ids = st.lists(st.integers(0, 2**31), max_size=5)
logprob = st.builds(
    TokenLogprob, id=st.integers(0, 9), lp=st.floats(-9999, 0), b=st.lists(st.integers(0, 255))
)
usages = st.builds(Usage, **{name: st.integers(0, 9) for name in Usage.__struct_fields__})
seqs = st.integers(1, 2**40)
events = st.one_of(
    st.builds(
        Delta,
        seq=seqs,
        i=st.integers(0, 127),
        text=texts,
        ids=ids,
        cached=st.integers(0, 99),
        lp=st.none() | st.lists(logprob, max_size=2),
        prompt_lp=st.none() | st.lists(st.none() | logprob, max_size=2),
    ),
    st.builds(
        Finish,
        seq=seqs,
        i=st.integers(0, 127),
        reason=st.sampled_from(["stop", "length", "tool_calls"]),
        stop=st.none() | texts | st.integers(0, 99),
    ),
    st.builds(
        End,
        seq=seqs,
        status=st.sampled_from(["done", "failed", "cancelled"]),
        usage=st.none() | usages,
        error=st.none() | st.just(HeadraceError("lost").to_wire()),
    ),
)


@given(events)
def test_events_come_back_as_they_were(event: Event) -> None:
    assert decode_fields(*stored(event)) == event
    assert decode_live(encode_live(event)) == event


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"type": b"news"},
        {b"type": b"delta", b"ids": b"[1.5]"},
        {b"type": b"delta", b"text": b"\xff"},
        {b"type": b"delta", b"i": b"x"},
        {b"type": b"finish", b"reason": b"bored"},
        {b"type": b"finish"},
        {b"type": b"end", b"status": b"maybe"},
    ],
)
def test_what_is_no_event_is_a_loss(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(HeadraceError) as caught:
        decode_fields(b"1-0", fields)
    assert caught.value.code == "lost"


def test_a_live_message_that_is_no_event() -> None:
    for data in (b"", b"[]", b'{"type":"news"}', b"\xff"):
        with pytest.raises(msgspec.DecodeError):
            decode_live(data)


@pytest.mark.redis
async def test_events_made_by_scripts_are_the_same_bytes(pool: Any, kit: Any) -> None:
    await pool.add(ttl_ms=1)
    subscriber = pool.redis.pubsub()
    await subscriber.psubscribe("*")
    _, claimed = await pool.take()
    ((entry_id, fields),) = await pool.redis.xrange(pool.keys.log(claimed.job_id))
    event = decode_fields(entry_id, fields)
    assert (entry_id, fields) == stored(event)
    while (message := await subscriber.get_message(ignore_subscribe_messages=True, timeout=5)) is None:
        pass
    assert message["data"] == encode_live(event)
    await subscriber.aclose()


@pytest.mark.redis
async def test_results_made_by_scripts_have_the_structs_shape(pool: Any, kit: Any) -> None:
    from headrace.messages import Choice, Result

    await pool.add(prompt="a", n=2)
    entry, claimed = await pool.take()
    lp = [TokenLogprob(id=1, lp=-0.5, b=[97], top=[TokenLogprob(id=2, lp=-1.0, b=[98])])]
    said: list[Event] = [
        Delta(seq=1, text="a", ids=[1], lp=lp, cached=2),
        Delta(seq=2, i=1, text="\x7f\u2028/", ids=[]),
        Delta(seq=3, text='"b"', ids=[2, 3], lp=lp),
        Finish(seq=4, reason="stop", stop="b"),
    ]
    await pool.emit(kit.item(entry, claimed, said))
    await pool.scripts.cancel(claimed.job_id)
    await pool.expire_leases()
    await pool.take("w2")
    job = await pool.job(claimed.job_id)
    assert msgspec.json.decode(job["result"], type=Result) == Result(
        choices=[
            Choice(index=0, text='a"b"', ids=[1, 2, 3], finish_reason="stop", stop="b", lp=lp + lp),
            Choice(index=1, text="\x7f\u2028/", ids=[]),
        ]
    )
    usage = msgspec.json.decode(job["usage"], type=Usage)
    assert usage == Usage(prompt_tokens=3, completion_tokens=3, total_tokens=6, cached_tokens=2)
