"""The command line, as `make bench` calls it."""

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app, reasons, with_command
from benchmarks.load import LoadError


def test_help_names_scenarios_and_modes() -> None:
    shown = CliRunner().invoke(app, ["batching", "--help"], env={"COLUMNS": "200"}).output
    assert "support-chat" in shown
    assert "one at a time" in shown


@pytest.mark.parametrize("wrong", [["--scenario", "no-such"], ["--mode", "no-such"], ["--rounds", "0"]])
def test_what_does_not_exist_is_refused_before_anything_starts(
    wrong: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.__main__.compare", lambda *_: pytest.fail("it started"))
    assert CliRunner().invoke(app, ["batching", *wrong]).exit_code == 2


def test_reasons_are_taken_out_of_their_groups() -> None:
    one, two = LoadError("one"), LoadError("two")
    assert reasons(ExceptionGroup("", [ExceptionGroup("", [one]), two])) == [one, two]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["batching"]),
        (["--rounds", "1"], ["batching", "--rounds", "1"]),
        (["latency", "--samples", "5"], ["latency", "--samples", "5"]),
        (["--help"], ["--help"]),
    ],
)
def test_batching_is_meant_where_no_command_is_named(arguments: list[str], expected: list[str]) -> None:
    assert with_command(arguments) == expected
