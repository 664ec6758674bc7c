"""Errors a user can act on. The command line prints the text alone and exits with `exit_code`."""

from __future__ import annotations


class TracekernError(Exception):
    """What is wrong, which thing, what was got and wanted, what to do: one line."""

    exit_code = 2


class BadInput(TracekernError):
    """A dump, trace, argument or environment that cannot be used as it is."""


class CommTimeout(TracekernError):
    """A kernel waited longer than its limit for a peer."""

    exit_code = 3
