"""The live buffer of a rank, which outlives its process."""

import importlib.util

if importlib.util.find_spec("fcntl") is None:  # not on Linux: nothing was built, which says more than a missing module
    from tracekern import _core  # noqa: F401
