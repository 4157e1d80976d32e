import json
import os

import pytest

from benchmarks.scenarios import SCENARIOS, support_chat
from benchmarks.workload import WORKLOAD, peers_workload, single_request
from headrace.models import ModelError, demo_model_path
from worker.text.codec import load_tokenizer


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_a_scenario_is_the_same_each_time_and_comes_in_order(name: str) -> None:
    requests = SCENARIOS[name](1.0)
    assert requests == SCENARIOS[name](1.0)
    assert [r.arrive_s for r in requests] == sorted(r.arrive_s for r in requests)
    assert all(r.fields["max_tokens"] == r.output_tokens > 0 for r in requests)
    assert len(SCENARIOS[name](0.2)) < len(requests)


def test_the_workload_is_the_peers_own() -> None:
    requests = peers_workload()
    assert (len(requests), sum(r.output_tokens for r in requests)) == (64, 3080)
    assert single_request().output_tokens == 128


def test_a_rate_spreads_the_same_requests_over_time() -> None:
    spread = peers_workload(2.0)
    assert [r.fields for r in spread] == [r.fields for r in peers_workload()]
    assert spread[-1].arrive_s == pytest.approx(2 * peers_workload(4.0)[-1].arrive_s)


def test_support_answers_are_as_long_as_the_scenario_says() -> None:
    assert all(5 <= r.output_tokens <= 200 for r in support_chat())


@pytest.mark.model
def test_the_demo_model_reads_the_prompts_as_the_ids_that_peers_are_given() -> None:
    try:
        codec = load_tokenizer(os.environ.get("HEADRACE_TEST_GGUF") or demo_model_path())
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    entries = json.loads(WORKLOAD.read_text(encoding="utf-8"))["requests"]
    assert [codec.encode_prompt(entry["prompt"]) for entry in entries] == [e["prompt_ids"] for e in entries]
