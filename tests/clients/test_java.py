"""Java's own HTTP client, which offers HTTP/2 with each request."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.redis]
SOURCE = Path(__file__).with_name("Ask.java")


@pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK is installed")
def test_a_stream_and_another_on_the_same_connection(stack: Any, kit: Any, expected: str) -> None:
    ask = json.dumps({**kit.ASK, "stream": True})
    command = ["java", "-XX:TieredStopAtLevel=1", str(SOURCE), stack.url, ask]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.isdigit()] == ["200", "200"]
    assert lines.count("data: [DONE]") == 2
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == expected * 2
