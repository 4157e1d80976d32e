"""`python -m gateway.tasks`."""

from __future__ import annotations

import logging

from headrace.cli.options import serve
from headrace.config import TasksSettings
from headrace.logs import configure_logging


def run(settings: TasksSettings) -> int:
    from gateway.tasks import service  # slow to import: not for --help

    configure_logging(settings.log_format, settings.log_level)
    logging.getLogger("arq").setLevel(logging.WARNING)  # at info it writes lines for every sweep
    return service.run(settings)


if __name__ == "__main__":
    serve(
        TasksSettings,
        run,
        prog="python -m gateway.tasks",
        description="Webhooks, batches and cleaning up: what no client waits for.",
    )
