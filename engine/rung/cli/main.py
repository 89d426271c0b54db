"""Entry point of the `rung` command: parses, runs one command, and turns errors into exit codes.

0 done, 64 a wrong setting, 65 a model that cannot be found, read or run, 70 the engine died,
130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from rung.cli.args import build_parser
from rung.config import Settings
from rung.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EXIT_CONFIG = 64
EXIT_MODEL = 65
EXIT_INTERRUPTED = 130

_COMMANDS = {
    "serve": "rung.cli.serve",
    "engine": "rung.cli.engine",
    "pull": "rung.cli.pull",
    "models": "rung.cli.models",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    try:
        arguments = vars(build_parser().parse_args(argv))
        command = importlib.import_module(_COMMANDS[arguments.pop("command")])
        run: Callable[[Settings], int] = command.run
        return run(Settings(arguments))
    except ConfigError as error:
        return _fail(error, EXIT_CONFIG)
    except ModelError as error:
        return _fail(error, EXIT_MODEL)
    except KeyboardInterrupt:
        # The terminal has echoed ^C; the shell's prompt belongs on a line of its own.
        print(file=sys.stderr)
        return EXIT_INTERRUPTED


def _fail(error: Exception, code: int) -> int:
    print(f"rung: {error}", file=sys.stderr)
    return code
