"""Entry point of `tracekern`: runs a command and turns errors into a line and an exit code.

0: done. 2: something is wrong with the input, the environment or tracekern itself. 3: a rank waited longer than its
limit for a peer. 130: interrupted. 143: `run moe` was ended by SIGTERM.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tracekern.errors import BadInput, TracekernError, packages_for, what_is_lacking
from tracekern.formatting import printable

_OF_THE_MACHINE = frozenset(
    {
        errno.EACCES,
        errno.EDQUOT,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
"""Errors that a file system may raise for any path that a user names."""


_INTERRUPTED = 130


def main() -> None:
    """Runs the command in sys.argv and exits."""
    try:
        _open_standard_streams()
        _run_command()
    except KeyboardInterrupt:
        _fail("interrupted", _INTERRUPTED)
    except SystemExit as end:
        if end.code == _INTERRUPTED:  # how typer ends on KeyboardInterrupt, without a message
            _fail("interrupted", _INTERRUPTED)
        raise


def _run_command() -> None:
    from tracekern.environment import warn_of_unread

    warn_of_unread()
    try:
        with packages_for("the command line"):
            import typer

            from tracekern.cli.app import app
    except BadInput as error:
        _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        _crash(error)
    try:
        with packages_for(f"tracekern {' '.join(sys.argv[1:2])}"):
            sys.exit(app(prog_name="tracekern", standalone_mode=False))
    except typer.TyperException as error:
        _refuse_arguments(error)
    except TracekernError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        if _is_working_directory_gone():
            _fail("the working directory does not exist any more; go to another one")
        if error.errno not in _OF_THE_MACHINE:
            _crash(error)
        _fail(f"{error.filename or 'output'}: {error.strerror}; name another place, or make room or rights there")
    except Exception as error:  # noqa: BLE001 - the outermost frame
        _crash(error)


def _refuse_arguments(error: Any) -> None:
    """Prints in one line what typer prints in a box, and exits."""
    text = error.format_message().rstrip(".")
    if not text:  # `tracekern` alone: its help has been printed
        sys.exit(error.exit_code)
    path = error.ctx.command_path.split()[1:] if error.ctx else []
    where = f"{' '.join(path)}: " if path else ""
    _fail(f"{where}{text[0].lower()}{text[1:]}; see {' '.join(['tracekern', *path, '--help'])}")


class _UntilReaderLeaves(io.FileIO):
    """A stream that drops output once the reader of its pipe has left, as `head` does; that is no error.

    It lies below every way to print, also below the interpreter's last flush, so that the exit code stays that of the
    command.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def _open_standard_streams() -> None:
    """Opens standard streams that the caller closed, as services do; their output is dropped without an error."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The lowest free descriptor is this stream's; child processes inherit it, too.
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r"))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # not a replaced stream, as in a notebook
            setattr(sys, name, _outlive_reader(stream))


def _outlive_reader(stream: Any) -> io.TextIOWrapper:
    """Returns the same stream, except that it drops output without a reader."""
    raw = _UntilReaderLeaves(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw) if isinstance(stream.buffer, io.BufferedWriter) else raw,  # `python -u` has none
        stream.encoding,
        # A terminal's encoding may lack arrows: a "?" is better than a report that ends halfway.
        stream.errors if stream.encoding.lower() in ("utf-8", "utf8") else "replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _is_working_directory_gone() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _crash(error: Exception) -> None:
    """Prints the whole traceback, unless the machine and not tracekern is at fault, and exits."""
    if lacks := what_is_lacking(error):
        _fail(f"{' '.join(sys.argv[1:2])}: {lacks}")
    traceback.print_exc()
    _fail("this is a fault of tracekern; please report it with the lines above")


def _fail(text: str, exit_code: int = 2) -> None:
    sys.stderr.write(f"tracekern: {printable(text)}\n")
    sys.exit(exit_code)
