"""Strict JSON bodies: no coercion, and every refusal names the field at fault."""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from litestar.dto import MsgspecDTO
from litestar.openapi.spec import Reference, Schema
from litestar.typing import FieldDefinition

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from litestar._openapi.schema_generation import SchemaCreator

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")


class StrictDTO(MsgspecDTO[S]):
    """Litestar would turn "48" into 48; a body is read by `decode` instead."""

    def decode_bytes(self, value: bytes) -> Any:
        return decode(value, self.model_type)

    @classmethod
    def create_openapi_schema(
        cls, field_definition: FieldDefinition, handler_id: str, schema_creator: SchemaCreator
    ) -> Reference | Schema:
        """The struct itself, under its own name."""
        return schema_creator.for_field_definition(field_definition)


def decode(raw: bytes, kind: type[T]) -> T:
    """Read a JSON body as `kind`. Raises `invalid_request` with the path of the field."""
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as exc:
        raise _invalid(str(exc)) from None
    except msgspec.DecodeError as exc:
        raise HeadraceError("invalid_request", f"Not valid JSON: {exc}.", _non_finite_field(raw)) from None
    except RecursionError:
        raise HeadraceError("invalid_request", "The body is nested too deeply.") from None


def _invalid(text: str) -> HeadraceError:
    path = _PATH.search(text)
    missing = _MISSING.search(text)
    inside = [path.group(1)] if path and path.group(1) else []
    field = ".".join(inside + ([missing.group(1)] if missing else [])) or None
    return HeadraceError("invalid_request", _PATH.sub("", text) + ".", field)


def _non_finite_field(raw: bytes) -> str | None:
    """The key whose value is NaN or Infinity: not JSON, yet what several JSON writers produce."""
    marker = object()

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, value in pairs:
            if value is marker or (isinstance(value, list) and marker in value):
                raise _FoundError(key)
        return dict(pairs)

    try:
        json.loads(raw, parse_constant=lambda _: marker, object_pairs_hook=look)
    except _FoundError as found:
        return str(found)
    except (ValueError, RecursionError):
        return None
    return None


class _FoundError(Exception):
    """Carries the key's name out of the JSON reader."""
