"""The messages of a chat as templates expect them, or a refusal that names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import HeadraceError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MAX_MESSAGES = 4096
_MAX_DEPTH = 16


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each with a known role and its content as one string. Raises HeadraceError naming the field."""
    if not isinstance(messages, list | tuple) or not messages:
        raise _invalid("At least one message is needed.")
    if len(messages) > _MAX_MESSAGES:
        raise HeadraceError("too_large", f"More than {_MAX_MESSAGES} messages.", "messages")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: object, field: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _invalid("A message is an object with role and content.", field)
    role = message.get("role")
    if role not in ROLES:
        raise _invalid(f"The role is one of {', '.join(ROLES)}.", f"{field}.role")
    rest = {key: value for key, value in message.items() if value is not None and isinstance(key, str)}
    if _depth(rest) > _MAX_DEPTH:
        raise _invalid("The message is nested too deeply.", field)
    may_be_empty = role == "assistant" and "tool_calls" in rest
    content = _joined_content(message.get("content"), f"{field}.content", may_be_empty)
    return {**rest, "role": role, "content": content}


def _joined_content(content: object, field: str, may_be_empty: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_empty:
        return ""
    if not isinstance(content, list | tuple):
        raise _invalid("The content is a string or a list of text parts.", field)
    return "\n".join(_part_text(part, f"{field}[{i}]") for i, part in enumerate(content))


def _part_text(part: object, field: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise _invalid("Only parts of type text are understood by this model.", f"{field}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise _invalid("A text part has its text in `text`.", f"{field}.text")
    return text


def _depth(value: object) -> int:
    if isinstance(value, Mapping):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list | tuple) else 0


def _invalid(message: str, field: str = "messages") -> HeadraceError:
    return HeadraceError("invalid_request", message, field)
