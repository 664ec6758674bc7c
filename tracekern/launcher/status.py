"""What a launched function ends with, as an exit status."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any


def exit_status(function: Callable[[], Any], who: str = "") -> int:
    """Calls the function. Returns the exit status: an int that it returns or exits with, 1 for any other exception.

    What it raises is printed, behind `who`. Raises KeyboardInterrupt if it did.
    """
    try:
        result = function()
        return result if type(result) is int else 0
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            sys.stderr.write(f"{who}{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - nothing above this frame would report it
        sys.stderr.write(who + "".join(traceback.format_exception(error)))  # at once: threads may write beside it
        return 1
