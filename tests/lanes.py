"""The three lanes of the tests, each of which `make test-LANE` runs alone.

browser: tests with a page in a browser, whose fixture says so. native: files that use a compiler, by what they import
of toolchains.py or of the helpers around it. python: all others.
"""

from __future__ import annotations

from types import ModuleType

import pytest

NATIVE_HELPERS = {"attack", "left_out", "toolchains"}


def uses_compiler(module: ModuleType) -> bool:
    """Whether it has a function or class of these helpers; a path such as ROOT is none."""
    owners = {getattr(value, "__module__", None) or "" for value in vars(module).values()}
    return not NATIVE_HELPERS.isdisjoint(owner.removeprefix("tests.") for owner in owners)


def lane_of(item: pytest.Function) -> str:
    if "browser" in item.fixturenames:
        return "browser"
    return "native" if uses_compiler(item.module) else "python"


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        item.add_marker(lane_of(item))
