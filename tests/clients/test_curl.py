"""curl, as in every README."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.redis]


@pytest.fixture
def curl(stack: Any) -> Any:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("curl is not installed")

    def run(path: str, *arguments: str) -> str:
        command = [program, "-sS", "--max-time", "20", *arguments, f"{stack.url}{path}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def json_of(ask: dict[str, Any]) -> tuple[str, ...]:
    return ("-H", "Content-Type: application/json", "-d", json.dumps(ask))


def test_whole_and_streamed(curl: Any, kit: Any, expected: str) -> None:
    whole = json.loads(curl("/v1/chat/completions", *json_of(kit.ASK)))
    assert whole["choices"][0]["message"]["content"] == expected
    text = curl("/v1/chat/completions", "-N", *json_of({**kit.ASK, "stream": True}))
    assert text.startswith(": headrace\n\n")
    assert text.endswith("data: [DONE]\n\n")
    data = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in data) == expected


def test_a_job_resumed_by_its_last_event(curl: Any) -> None:
    job = json.loads(curl("/v1/jobs", *json_of({"prompt": "x", "max_tokens": 9, "temperature": 0})))
    events = f"/v1/jobs/{job['id']}/events"
    whole = curl(events, "-N")
    rest = curl(events, "-N", "-H", "Last-Event-ID: 4")
    assert whole.split("id: 5\n", 1)[1] == rest.split("id: 5\n", 1)[1]
    assert "id: 4\n" not in rest
    assert curl(events, "-H", "Last-Event-ID: 11", "-o", "/dev/null", "-w", "%{http_code}") == "204"


def test_without_a_content_type(curl: Any, kit: Any, expected: str) -> None:
    """`curl -d` says application/x-www-form-urlencoded unless told otherwise."""
    answer = json.loads(curl("/v1/chat/completions", "-d", json.dumps(kit.ASK)))
    assert answer["choices"][0]["message"]["content"] == expected
