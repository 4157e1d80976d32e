"""The command line: `headrace`, and the options of `python -m worker` and `python -m gateway`."""


def main() -> None:
    from headrace.cli.app import app  # late: the services take their options from here, and nothing else

    app()
