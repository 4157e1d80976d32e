"""`python -m gateway`."""

from __future__ import annotations

import gc

from headrace.cli.options import serve
from headrace.config import GatewaySettings
from headrace.logs import configure_logging


def run(settings: GatewaySettings) -> int:
    # What is imported lives to the end: to collect it now and again costs start-up, and all streams a pause.
    gc.disable()
    from gateway import server  # slow to import: not for --help

    gc.freeze()
    gc.enable()
    configure_logging(settings.log_format, settings.log_level)
    return server.run(settings)


if __name__ == "__main__":
    serve(
        GatewaySettings,
        run,
        prog="python -m gateway",
        description="The HTTP gateway: OpenAI-compatible, and jobs.",
    )
