"""`python -m gateway`."""

from __future__ import annotations

from headrace.cli.options import serve
from headrace.config import GatewaySettings
from headrace.logs import configure_logging
from headrace.startup import for_life


def run(settings: GatewaySettings) -> int:
    with for_life():
        from gateway import server  # slow to import: not for --help

    configure_logging(settings.log_format, settings.log_level)
    return server.run(settings)


if __name__ == "__main__":
    serve(
        GatewaySettings,
        run,
        prog="python -m gateway",
        description="The HTTP gateway: OpenAI-compatible, and jobs.",
    )
