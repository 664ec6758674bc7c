"""Entry point of `tracekern`: runs a command and turns what goes wrong into a line and an exit code.

0: done. 2: something is wrong with the input, the environment or tracekern itself. 3: a rank waited longer than its
limit for a peer. 130: interrupted.
"""

from __future__ import annotations

import errno
import sys
import traceback

from tracekern.errors import TracekernError


def main() -> None:
    """Runs the command in sys.argv and exits."""
    try:
        from tracekern.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        _fail(f"the command line needs {error.name}, which is not installed here; pip install 'tracekern[run]'")
    try:
        app()
    except TracekernError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            _crash()
        _fail(f"{error.filename or 'output'}: no space left on the disk; free some or write elsewhere")
    except Exception:  # noqa: BLE001 - the outermost frame: shows the fault whole
        _crash()


def _crash() -> None:
    traceback.print_exc()
    _fail("this is a fault of tracekern; please report it with the lines above")


def _fail(text: str, exit_code: int = 2) -> None:
    sys.stderr.write(f"tracekern: {text}\n")
    sys.exit(exit_code)
