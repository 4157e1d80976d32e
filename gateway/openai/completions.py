"""POST /v1/completions: several prompts are several jobs, whose choices are numbered prompt by prompt."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any

import msgspec
from litestar import Request, Response, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import Body

from gateway.core import GatewayHere
from gateway.errors import ERROR_RESPONSES
from gateway.openai.logprobs import TextOffsets, first_token_bytes
from gateway.openai.requests import plan_completion
from gateway.openai.schema import (
    CompletionDTO,
    CompletionRequest,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    UsageBody,
)
from gateway.openai.serve import Head, Writer, answer
from gateway.stream import sse
from gateway.template import HOLE, Template
from headrace.messages import Choice, Delta, Finish, Result, TokenLogprob


class TextWriter(Writer):
    """Chunks of one completion stream, and the whole answer."""

    def __init__(self, head: Head, *, num_top: int | None) -> None:
        self._head = head
        self._num_top = num_top
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(TextOffsets)
        self._begun: set[int] = set()
        self._templates: dict[int, Template] = {}
        self._prompt_lp: dict[int, list[TokenLogprob | None]] = {}

    def delta(self, prompt_index: int, event: Delta) -> bytes:
        if event.prompt_lp is not None:
            self._prompt_lp[prompt_index] = event.prompt_lp
        index = self._index(prompt_index, event.i)
        text = self._prefix(prompt_index, index) + event.text
        if event.lp is not None and (text or event.lp):
            logprobs = self._logprobs(prompt_index, index, event.lp)
            return self._chunk(TextChoice(index=index, text=text, logprobs=logprobs))
        return self._template(index).fill(text) if text else b""

    def finish(self, prompt_index: int, event: Finish) -> bytes:
        index = self._index(prompt_index, event.i)
        text = self._prefix(prompt_index, index)
        return self._chunk(TextChoice(index=index, text=text, finish_reason=event.reason))

    def usage(self, usage: UsageBody) -> bytes:
        return sse(msgspec.json.encode(self._completion([], usage)))

    def whole(self, results: list[Result], usage: UsageBody) -> TextCompletion:
        choices = [
            self._whole_choice(prompt_index, result, choice)
            for prompt_index, result in enumerate(results)
            for choice in result.choices
        ]
        completion = self._completion(choices, usage)
        completion.system_fingerprint = results[0].fingerprint or self._head.fingerprint
        return completion

    def _whole_choice(self, prompt_index: int, result: Result, choice: Choice) -> TextChoice:
        if result.prompt_lp is not None:
            self._prompt_lp[prompt_index] = result.prompt_lp
        index = self._index(prompt_index, choice.index)
        return TextChoice(
            index=index,
            text=self._prefix(prompt_index, index) + choice.text,
            logprobs=self._logprobs(prompt_index, index, choice.lp),
            finish_reason=choice.finish_reason,
        )

    def _index(self, prompt_index: int, choice_index: int) -> int:
        return prompt_index * self._head.num_choices + choice_index

    def _prefix(self, prompt_index: int, index: int) -> str:
        """What comes before a choice's first text: its prompt, if it is echoed."""
        if self._head.echo is None or index in self._begun:
            return ""
        self._begun.add(index)
        return self._head.echo[prompt_index]

    def _logprobs(
        self, prompt_index: int, index: int, tokens: list[TokenLogprob] | None
    ) -> TextLogprobs | None:
        if tokens is None or self._num_top is None:
            return None
        prompt: list[TokenLogprob | None] = []
        first = b""
        if self._head.echo is not None and index not in self._offsets:
            prompt = self._prompt_lp.get(prompt_index, [])
            first = first_token_bytes(self._head.echo[prompt_index], prompt)
        return self._offsets[index].lists([*prompt, *tokens], with_top=self._num_top > 0, first=first)

    def _template(self, index: int) -> Template:
        if index not in self._templates:
            self._templates[index] = Template(self._chunk(TextChoice(index=index, text=HOLE)))
        return self._templates[index]

    def _chunk(self, choice: TextChoice) -> bytes:
        usage = None if self._head.include_usage else msgspec.UNSET
        return sse(msgspec.json.encode(self._completion([choice], usage)))

    def _completion(
        self, choices: list[TextChoice], usage: UsageBody | msgspec.UnsetType | None
    ) -> TextCompletion:
        head = self._head
        return TextCompletion(
            id=head.id,
            created=head.created_s,
            model=head.model,
            choices=choices,
            system_fingerprint=head.fingerprint,
            usage=usage,
        )


@post(
    "/completions",
    dto=CompletionDTO,
    return_dto=None,
    status_code=200,
    tags=["OpenAI"],
    summary="Text completion",
    responses={200: ResponseSpec(TextCompletion, description="The whole answer."), **ERROR_RESPONSES},
)
async def create_completion(
    data: Annotated[CompletionRequest, Body(description="With `stream`, the answer is text/event-stream.")],
    request: Request[Any, Any, Any],
    gateway: GatewayHere,
) -> Response[Any]:
    plan = await plan_completion(gateway, request, data)
    return await answer(gateway, request, plan, TextWriter(plan.head, num_top=data.logprobs))
