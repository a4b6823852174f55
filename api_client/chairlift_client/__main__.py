"""The command `chairlift`, also as `python -m chairlift_client`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from chairlift_client.errors import ChairliftError, ConfigError, IdempotencyConflict, InvalidJob, UnknownModel
from chairlift_client.extras import needs_cli

USAGE = (ConfigError, IdempotencyConflict, InvalidJob, UnknownModel)
"""What the caller got wrong: exit code 2. Everything else that goes wrong is 1."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; always ends in SystemExit. Errors are one line on stderr, never a traceback."""
    try:
        from chairlift_client.cli import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        sys.exit(_complain(needs_cli(sys.argv[1:] if arguments is None else arguments, missing), 2))
    try:
        app(args=None if arguments is None else list(arguments), prog_name="chairlift")
    except ChairliftError as error:
        sys.exit(_complain(str(error), 2 if isinstance(error, USAGE) else 1))


def _complain(message: str, code: int) -> int:
    print(f"chairlift: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
