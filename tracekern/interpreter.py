"""Starts Python for processes of ours, with the imports of this process but without the working directory.

`python -m` and `python -c` put the working directory first on sys.path. Where others can write to it, a module of
theirs would run as this user: an `ssl.py`, for example. Python has `-P` against that only from 3.11 on.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

_VARIABLE = "PYTHONPATH"


def python_call(
    function: Callable[..., Any], *arguments: str, env: Mapping[str, str], target: str = ""
) -> tuple[list[str], dict[str, str]]:
    """Returns command and environment of a process that calls a function of ours; it returns the exit status.

    env: environment of the process, whose PYTHONPATH counts. target: a module that the function will import. Where this
    process would import that from the working directory, the new one does, too.
    """
    given = list(filter(None, env.get(_VARIABLE, "").split(os.pathsep)))  # an empty entry is the working directory
    path = _path(given, [__name__, target])
    # An interpreter has imported nothing from the working directory before its program begins, and sys is built in.
    program = (
        f"import sys; sys.path[:] = {path!r}; from {function.__module__} import {function.__name__} as main; "
        "sys.exit(main(*sys.argv[1:]))"
    )
    clean = {_VARIABLE: os.pathsep.join(given)} if given else {}
    return [sys.executable, "-c", program, *arguments], {k: v for k, v in env.items() if k != _VARIABLE} | clean


def _path(given: list[str], modules: list[str]) -> list[str]:
    """Returns the new process's sys.path: this one's, behind what is given and not on it.

    The working directory is left out, unless it is given or holds one of the modules.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:  # removed meanwhile: nothing can be imported from there
        given, own = ([path for path in paths if os.path.isabs(path)] for paths in (given, sys.path))
    else:
        given, own = ([os.path.join(here, path) for path in paths] for paths in (given, sys.path))
        wanted = {os.path.realpath(path) for path in given}.union(*map(_folders, modules))
        if os.path.realpath(here) not in wanted:
            own = [path for path in own if os.path.realpath(path) != os.path.realpath(here)]
    return list(dict.fromkeys([*(path for path in given if path not in own), *own]))


def _folders(module: str) -> set[str]:
    """Returns the directories that this process imports a module's topmost package from."""
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):  # none of this name, or one that was not imported, as __main__
        spec = None
    places = (spec.submodule_search_locations or [spec.origin or ""]) if spec else []
    return {os.path.realpath(os.path.dirname(place)) for place in places if os.path.isabs(place)}
