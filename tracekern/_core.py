"""Takes the place of the compiled part where that was not built: Python prefers the extension of this name."""

from tracekern.errors import NotBuilt

raise NotBuilt(
    "tracekern was installed without its compiled extension, which recording, `run`, `overhead`, `salvage`, `snapshot` "
    "and Perfetto traces need; on Linux install g++ (C++20), and in tracekern's source run `TRACEKERN_EXTENSION=1 pip "
    "install --force-reinstall --no-deps .`"
)
