"""Fixtures of the tests of engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fabric_pairs import NETS, Pair
from fabric_processes import shim_fixture  # noqa: F401 - a fixture


@pytest.fixture(params=NETS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two engines of this process, over each of NETS."""
    made = Pair(NETS[request.param])
    yield made
    made.stop()


@pytest.fixture
def tcp() -> Iterator[Pair]:
    made = Pair(NETS["tcp"])
    yield made
    made.stop()
