"""`python -m worker`: one inference worker for one pool."""

from __future__ import annotations

import asyncio

from headrace.cli.options import serve
from headrace.config import WorkerSettings
from headrace.logs import configure_logging
from headrace.startup import for_life


def run(settings: WorkerSettings) -> int:
    configure_logging(settings.log_format, settings.log_level)
    with for_life():
        # Imported late: --help and a wrong flag should not wait for torch.
        from worker.build import build
        from worker.service import WorkerService

        built = build(settings)

    async def main() -> int:
        return await WorkerService(settings, built.engine, built.model, built.card).run()

    return asyncio.run(main())


if __name__ == "__main__":
    serve(WorkerSettings, run, prog="python -m worker", description="Run one Headrace worker.")
