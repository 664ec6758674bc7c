"""Takes the place of the transfer engine where it was not built: Python prefers the extension of this name."""

from tracekern.errors import NotBuilt

raise NotBuilt(
    "tracekern was installed without its transfer engine; where libfabric's headers are (Debian: libfabric-dev), run "
    "`pip install --force-reinstall --no-deps .` in its source"
)
