"""Three kinds of real traffic, seeded: the same seed gives the same requests at the same times."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping

from benchmarks.workload import Request, forced, peers_workload

_WORDS = (
    *(
        "order",
        "account",
        "refund",
        "invoice",
        "delivery",
        "address",
        "password",
        "login",
        "update",
        "device",
    ),
    *(
        "screen",
        "battery",
        "network",
        "payment",
        "receipt",
        "option",
        "setting",
        "printer",
        "cable",
        "signal",
    ),
    *("error", "message", "change", "cancel", "return", "replace", "today", "yesterday", "urgent", "please"),
    *("again", "still", "never", "always", "because", "after", "before", "without", "between", "morning"),
)
_CODE = (
    *(
        "def parse(line):",
        "    return line.split(',')",
        "class Cache:",
        "    def get(self, key):",
        "import json",
    ),
    *("for row in rows:", "    total += row.value", "if not items:", "    raise ValueError(items)", "try:"),
    *(
        "while queue:",
        "    node = queue.pop()",
        "async def fetch(url):",
        "    reply = await get(url)",
        "# TODO",
    ),
    *(
        "    log.info('done %s', name)",
        "except OSError as error:",
        "    yield from walk(child)",
        "",
        "    return",
    ),
)
_SUPPORT_SYSTEM = (
    "You are the support desk of a shop that sells small electronics. Be brief, be kind, never promise a "
    "date. Ask for the order number when it is missing. Refunds take five days. Returns are free for a month."
)


def support_chat(scale: float = 1.0, seed: int = 1) -> list[Request]:
    """Hundreds of users with one short question each; a shared system prompt; answers of 5 to 200 tokens."""
    rng = random.Random(seed)
    at, requests = 0.0, []
    for _ in range(_count(200, scale)):
        at += rng.expovariate(4.0)
        question = _sentence(rng, rng.randint(6, 40))
        messages = [{"role": "system", "content": _SUPPORT_SYSTEM}, {"role": "user", "content": question}]
        answer = min(200, max(5, round(rng.lognormvariate(3.6, 0.8))))
        requests.append(forced({"messages": json.dumps(messages)}, answer, at))
    return requests


def search_questions(scale: float = 1.0, seed: int = 2) -> list[Request]:
    """Short questions with short answers, in bursts with silence between them."""
    rng = random.Random(seed)
    at, requests = 0.0, []
    for _ in range(_count(10, scale)):
        at += rng.uniform(2.0, 5.0)
        for _ in range(rng.randint(10, 30)):
            prompt = "Q: " + _sentence(rng, rng.randint(3, 10)) + "?\nA:"
            requests.append(forced({"prompt": prompt}, rng.randint(4, 24), at + rng.uniform(0, 0.3)))
    return sorted(requests, key=lambda request: request.arrive_s)


def code_assistant(scale: float = 1.0, seed: int = 3) -> list[Request]:
    """A few users with long files; most completions are one line, some are pages."""
    rng = random.Random(seed)
    at, requests = 0.0, []
    for _ in range(_count(40, scale)):
        at += rng.expovariate(0.8)
        lines = rng.choices(_CODE, k=rng.choice([8, 20, 45, 90]))
        answer = rng.randint(5, 25) if rng.random() < 0.7 else rng.randint(150, 500)
        requests.append(forced({"prompt": "\n".join(lines) + "\n"}, answer, at))
    return requests


def workload(scale: float = 1.0) -> list[Request]:
    """The peers' 64 requests, all at once; with a scale below 1 the first of them only."""
    return peers_workload()[: _count(64, scale)]


SCENARIOS: Mapping[str, Callable[[float], list[Request]]] = {
    "workload": workload,
    "support-chat": support_chat,
    "search": search_questions,
    "code": code_assistant,
}


def _count(number: int, scale: float) -> int:
    return max(1, round(number * scale))


def _sentence(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=num_words)).capitalize()
