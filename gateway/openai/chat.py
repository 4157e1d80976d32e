"""POST /v1/chat/completions: events and results in the shape of chat completions."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Request, Response, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import Body

from gateway.core import GatewayHere
from gateway.errors import ERROR_RESPONSES
from gateway.openai.logprobs import chat_logprobs
from gateway.openai.requests import plan_chat
from gateway.openai.schema import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatDTO,
    ChatMessage,
    ChatRequest,
    UsageBody,
)
from gateway.openai.serve import Head, Writer, answer
from gateway.stream import sse
from gateway.template import HOLE, Template
from headrace.messages import Choice, Delta, Finish, Result


class ChatWriter(Writer):
    """Chunks of one chat stream. Each choice begins with a chunk that has the role."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._templates: dict[int, Template] = {}  # of the choices that have begun

    def delta(self, prompt_index: int, event: Delta) -> bytes:
        begin = b"" if event.i in self._templates else self._begin(event.i)
        if event.lp is not None and (event.text or event.lp):
            delta = ChatDelta(content=event.text)
            return begin + self._chunk(event.i, delta, logprobs=chat_logprobs(event.lp))
        return begin + self._templates[event.i].fill(event.text) if event.text else begin

    def finish(self, prompt_index: int, event: Finish) -> bytes:
        begin = b"" if event.i in self._templates else self._begin(event.i)
        return begin + self._chunk(event.i, ChatDelta(), finish_reason=event.reason)

    def usage(self, usage: UsageBody) -> bytes:
        return self._encode([], usage)

    def whole(self, results: list[Result], usage: UsageBody) -> ChatCompletion:
        result = results[0]
        head = self._head
        return ChatCompletion(
            id=head.id,
            created=head.created_s,
            model=head.model,
            choices=[_choice(choice) for choice in result.choices],
            usage=usage,
            system_fingerprint=result.fingerprint or head.fingerprint,
            seed=result.seed,
        )

    def _begin(self, index: int) -> bytes:
        self._templates[index] = Template(self._chunk(index, ChatDelta(content=HOLE)))
        return self._chunk(index, ChatDelta(role="assistant", content=""))

    def _chunk(self, index: int, delta: ChatDelta, **fields: Any) -> bytes:
        usage = None if self._head.include_usage else msgspec.UNSET
        return self._encode([ChatChunkChoice(index=index, delta=delta, **fields)], usage)

    def _encode(self, choices: list[ChatChunkChoice], usage: UsageBody | msgspec.UnsetType | None) -> bytes:
        head = self._head
        chunk = ChatChunk(
            id=head.id,
            created=head.created_s,
            model=head.model,
            system_fingerprint=head.fingerprint,
            choices=choices,
            usage=usage,
        )
        return sse(msgspec.json.encode(chunk))


def _choice(choice: Choice) -> ChatChoice:
    return ChatChoice(
        index=choice.index,
        message=ChatMessage(content=choice.text),
        logprobs=chat_logprobs(choice.lp) if choice.lp is not None else None,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop,
    )


@post(
    "/chat/completions",
    dto=ChatDTO,
    return_dto=None,
    status_code=200,
    tags=["OpenAI"],
    summary="Chat completion",
    responses={200: ResponseSpec(ChatCompletion, description="The whole answer."), **ERROR_RESPONSES},
)
async def create_chat_completion(
    data: Annotated[ChatRequest, Body(description="With `stream`, the answer is text/event-stream.")],
    request: Request[Any, Any, Any],
    gateway: GatewayHere,
) -> Response[Any]:
    plan = await plan_chat(gateway, request, data)
    return await answer(gateway, request, plan, ChatWriter(plan.head))
