"""Takes the place of the compiled part where that was not built: Python prefers the extension of this name."""

from tracekern.errors import NotBuilt

raise NotBuilt(
    "the compiled part of tracekern (tracekern._C) is not built here; run `pip install .` in its source, where g++ is"
)
