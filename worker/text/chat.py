"""Chat messages by the model's own template, so that no message can speak with the template's voice.

A control token (`<|im_end|>`) is one only where the template itself writes it. Its spelling inside a message
is fenced before the template runs, and encoded as plain text afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import HeadraceError
from worker.text.chat_messages import checked_messages
from worker.text.fence import ControlTexts, Fence, Mask, RenderedPiece


class ChatTemplate:
    """One model's template, compiled in a sandbox. Raises jinja2.TemplateError when it cannot be compiled."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], control_texts: Iterable[str]) -> None:
        self._template = _environment().from_string(source)
        self._knows_developer = "developer" in source
        self._special_tokens = dict(special_tokens)
        self._controls = ControlTexts(control_texts)

    def render(
        self, messages: Sequence[Mapping[str, Any]], now: datetime | None = None
    ) -> list[RenderedPiece]:
        """The rendered chat with the assistant's turn opened. Raises HeadraceError naming the field.

        `now` is what a template that writes today's date sees; the present moment unless given.
        """
        checked = checked_messages(messages)
        fence = Fence.around(checked, self._controls)
        pieces = fence.split(self._render(checked, fence, now))
        mask = Mask.of(checked, self._controls)
        if mask is None:
            return pieces
        # A template that cuts and joins messages may have put a control token together out of harmless parts.
        masked = mask.split(self._render(checked, mask, now))
        same = self._controls.count(pieces) == self._controls.count(masked)
        return pieces if same else masked

    def _render(self, checked: Sequence[dict[str, Any]], guard: Fence | Mask, now: datetime | None) -> str:
        try:
            return self._template.render(
                messages=[self._for_template(message, guard) for message in checked],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                strftime_now=(now or datetime.now(UTC)).strftime,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise HeadraceError(
                "invalid_request", f"The model's chat template refuses these messages: {error}", "messages"
            ) from error

    def _for_template(self, message: dict[str, Any], fence: Fence | Mask) -> dict[str, Any]:
        role = message["role"]
        if role == "developer" and not self._knows_developer:
            role = "system"
        return {**fence.guard(message), "role": role}


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it only passes them through."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The names and settings that Hugging Face chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
