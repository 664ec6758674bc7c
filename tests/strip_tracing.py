"""A copy of csrc without any tracing macro."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

MACRO = re.compile(r"\bTK_(?:RANGE|WAIT|WAIT_IF|SIGNAL|END|END_IF|END_AFTER|TIME|WAIT_SINCE|MARK|NEXT|SEQUENCE)\(")
BARRIER = re.compile(r"\bTK_END_AFTER_BARRIER\(([\w.]+)\);")
UNTRACED = """template <class F>
void with_untraced(F f) {
    f.template operator()<Recorder<false>>();
}

"""


def stripped(text: str) -> str:
    """Statements that a macro makes, parentheses balanced, go; of a barrier that ends a span the barrier stays."""
    text = BARRIER.sub(r"\1.block_sync();", text)
    while match := MACRO.search(text):
        depth, at = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        assert text[at] == ";", f"a macro is a statement of its own: {text[match.start() : at + 1]}"
        text = text[: match.start()] + text[at + 1 :]
    return text


def copy_stripped(csrc: Path, copy: Path) -> Path:
    """Copies csrc and strips all but the recorder itself. Families have only their untraced kernels. Returns `copy`."""
    shutil.copytree(csrc, copy)
    for part in ("comm", "moe"):
        for path in (copy / part).rglob("*.*"):
            text = stripped(path.read_text())
            left = re.search(r"\bTK_(?:END|MARK|NEXT|RANGE|SEQUENCE|SIGNAL|TIME|WAIT)", text)
            assert left is None, f"{path.name}: {text[max(0, left.start() - 80) : left.end() + 40]}"
            path.write_text(text)
    entry = copy / "moe" / "entry.h"
    text, count = re.subn(r"with_recorder_type<[^(]*>\(kind, ", "with_untraced(", entry.read_text())
    assert count == 1
    entry.write_text(text.replace("template <class Family>", UNTRACED + "template <class Family>", 1))
    return copy
