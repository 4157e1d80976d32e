import pytest

from benchmarks.load import LoadError
from benchmarks.peers.client import EventStream

EVENTS = [
    b'data: {"choices": [{"text": "a"}]}\n\n',
    b': still here\n\ndata: {"choices": [{"text": "b", "finish_reason": null}]}\n\n',
    b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n',
    b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n',
]


def response(events: list[bytes], status: str = "200 OK") -> bytes:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)
    return f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_tokens_are_counted_wherever_the_bytes_are_cut(size: int) -> None:
    stream, data = EventStream(0.0), response(EVENTS)
    for first in range(0, len(data), size):
        stream.feed(data[first : first + size])
    assert stream.done
    assert (len(stream.token_s), stream.tokens) == (2, 2)


def test_a_refusal_is_told_with_its_status() -> None:
    with pytest.raises(LoadError, match=r"503.*busy"):
        EventStream(0.0).feed(response([b'{"error": "busy"}'], "503 Service Unavailable"))


def test_an_error_within_the_stream_is_an_error() -> None:
    with pytest.raises(LoadError, match="lost"):
        EventStream(0.0).feed(response([b'data: {"error": {"code": "lost"}}\n\n']))
