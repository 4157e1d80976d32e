"""Ask over HTTP with OpenAI's own client.

python examples/ask_openai.py "Why is the sky blue?"
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI


def ask(client: OpenAI, model: str, question: str) -> None:
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=64, stream=True
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print()


if __name__ == "__main__":
    url = os.environ.get("URL", "http://127.0.0.1:8080") + "/v1"
    ask(
        OpenAI(base_url=url, api_key=os.environ.get("KEY", "none")),
        os.environ.get("POOL", "smollm2"),
        sys.argv[1],
    )
