"""The bundled kernels as calls, and `tracekern run`."""

from tracekern import _core  # noqa: F401 - says in one line that it was not built, before a module only Linux has is missing
