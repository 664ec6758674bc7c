"""The live buffer of a rank, which outlives its process."""

from tracekern import _C  # noqa: F401 - says in one line that it was not built, before a module only Linux has is missing
