import pytest

from benchmarks.load import LoadError
from benchmarks.peers.work import (
    Answer,
    Mode,
    PeerRequest,
    decode_tokens_per_s,
    requests_of,
    summary_of,
    tokens_a_request,
)


def test_the_workload_is_the_fixed_one() -> None:
    requests = requests_of(Mode("offline"))
    assert len(requests) == 64
    assert sum(len(request.prompt_ids) for request in requests) == 5_844
    assert sum(request.output_tokens for request in requests) == 3_080
    assert tokens_a_request() == pytest.approx(48.125)
    assert all(request.arrive_s == 0 for request in requests)


def test_a_rate_only_stretches_the_same_arrivals() -> None:
    slow, fast = (requests_of(Mode("online", rate)) for rate in (1.0, 4.0))
    assert [r.arrive_s for r in slow] == pytest.approx([4 * r.arrive_s for r in fast])
    assert slow[-1].arrive_s == pytest.approx(64, rel=0.5)


def test_single_is_one_request() -> None:
    [request] = requests_of(Mode("single"))
    assert (len(request.prompt_ids), request.output_tokens) == (32, 128)


def test_tokens_are_those_the_server_counted() -> None:
    answer = Answer(7, 0.0, [1.0, 2.0], 2.0, tokens=3)  # one token had no text of its own
    summary = summary_of([PeerRequest(7, [1], 3)], [answer])
    assert (summary.output_tokens, summary.tokens_per_s) == (3, 1.5)
    assert decode_tokens_per_s(answer) == 2.0


@pytest.mark.parametrize("answers", [[], [Answer(7, 0.0, [1.0], 1.0, tokens=2)]])
def test_a_wrong_length_spoils_the_run(answers: list[Answer]) -> None:
    with pytest.raises(LoadError, match="request 7"):
        summary_of([PeerRequest(7, [1], 3)], answers)
