import pytest
import typer
from typer.testing import CliRunner

from headrace.cli.options import settings_command
from headrace.config import CommonSettings, GatewaySettings, WorkerSettings, fields


def run(cls: type[CommonSettings], *arguments: str) -> tuple[int, str, list[CommonSettings]]:
    seen: list[CommonSettings] = []

    def keep(settings: CommonSettings) -> int:
        seen.append(settings)
        return 3

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(settings_command(cls, keep))
    outcome = CliRunner().invoke(app, list(arguments))
    return outcome.exit_code, outcome.output, seen


def test_flags_become_settings_and_the_status_is_the_services() -> None:
    status, _, seen = run(WorkerSettings, "--max-num-seqs", "8", "--no-prefix-cache", "--pool", "p")
    assert status == 3
    settings = seen[0]
    assert isinstance(settings, WorkerSettings)
    assert (settings.max_num_seqs, settings.prefix_cache, settings.pool) == (8, False, "p")


def test_flags_win_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "1000")
    monkeypatch.setenv("HEADRACE_POOL", "from-env")
    _, _, seen = run(GatewaySettings, "--port", "2000")
    assert isinstance(seen[0], GatewaySettings)
    assert (seen[0].port, seen[0].pool) == (2000, "from-env")


@pytest.mark.parametrize("arguments", [("--max-num-seqs", "zero"), ("--device", "tpu")])
def test_a_bad_value_is_one_line_and_status_2(arguments: tuple[str, str]) -> None:
    status, output, seen = run(WorkerSettings, *arguments)
    assert (status, seen) == (2, [])
    assert output.startswith("error: HEADRACE_")
    assert output.count("\n") == 1


@pytest.mark.parametrize("cls", [WorkerSettings, GatewaySettings])
def test_help_shows_flag_text_default_and_variable(cls: type[CommonSettings]) -> None:
    _, output, _ = run(cls, "--help")
    text = " ".join(output.split()).replace("- ", "-")
    for field in fields(cls):
        assert field.flag in text
        assert f"env: {field.env}]" in text
        assert field.description in text or field.description in text.replace("-", "- ")
