"""Where the tree that is tested lies, for tests in any folder."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
TRACES = ROOT / "traces"
