"""The served OpenAPI document against its server, with requests that schemathesis generates."""

from __future__ import annotations

from typing import Any

import httpx
import hypothesis
import pytest
import requests
import schemathesis

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.filterwarnings("ignore")]

EXAMPLES = {"positive": 5, "negative": 3}  # to each operation
QUICK = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "n": 1, "stream": False}


@pytest.fixture(scope="module")
def schema(stack: Any) -> Any:
    schema = schemathesis.openapi.from_dict(httpx.get(f"{stack.url}/schema/openapi.json", timeout=20).json())
    schema.config.base_url = stack.url
    return schema


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_the_document_says_what_is_served(schema: Any, mode: str) -> None:
    told = []
    for found in schema.get_all_operations():
        operation = found.ok()
        if mode == "negative" and not _can_be_wrong(operation):
            continue
        try:
            _check(operation, mode)
        except BaseExceptionGroup as problems:
            told.append(f"{operation.label}: {problems.exceptions[0]}")
    assert not told, "\n\n".join(told)


def _can_be_wrong(operation: Any) -> bool:
    """Any text does as an id in a path."""
    return any((operation.body, operation.query, operation.headers))


def _check(operation: Any, mode: str) -> None:
    generation_mode = schemathesis.GenerationMode(mode)

    @hypothesis.given(case=operation.as_strategy(generation_mode=generation_mode))
    @hypothesis.settings(
        max_examples=EXAMPLES[mode],
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def check(case: Any) -> None:
        _shorten(case)
        case.call_and_validate(session=session, timeout=20, excluded_checks=_excluded())

    with requests.Session() as session:
        check()


def _excluded() -> list[Any]:
    """A range that the document does not tell is told by the refusal itself, which names the field."""
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    return [positive_data_acceptance]


def _shorten(case: Any) -> None:
    """Answers in full, and soon: streams and long waits have tests of their own."""
    if isinstance(case.body, dict):
        case.body.update({name: value for name, value in QUICK.items() if name in case.body})
    if isinstance(case.query, dict) and "wait" in case.query:
        case.query["wait"] = 0
