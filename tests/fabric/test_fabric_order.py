"""Writes that overtake each other: every count is exact all the same, and no byte is stale when it is reached."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from fabric_pairs import LIMIT_S, LOOPBACK, Done, Pair, wait_until

from tracekern.fabric import Net, PageIndices

PAGE_BYTES = 64
PAGES = 250
"""Of a request."""
REQUESTS = 4
"""Under way side by side, each with memory and an immediate of its own."""
WRITES_A_ROUND = REQUESTS * PAGES


@pytest.fixture(params=["2 domains", "4 domains", "efa"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    domains = {"2 domains": 2, "4 domains": 4, "efa": 1}[request.param]
    if request.param == "efa":
        request.getfixturevalue("efa_rules")
    made = Pair([Net("tcp", f"127.0.0.{number + 1}") for number in range(domains)], WRITES_A_ROUND * PAGE_BYTES)
    yield made
    made.stop()


@pytest.mark.parametrize("writes", [3000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_counts_are_exact_and_no_byte_is_stale(pair, writes):
    draw = random.Random(3)
    counters = [pair.target.make_imm_counter(request) for request in range(REQUESTS)]
    sent = pair.sent.view(REQUESTS, PAGES, PAGE_BYTES)
    received = pair.received.view(REQUESTS, PAGES, PAGE_BYTES)
    done = Done()
    for call in range(writes // WRITES_A_ROUND):
        pair.sent.random_(0, 256)
        orders = [draw.sample(range(PAGES), PAGES) for _ in range(REQUESTS)]
        for request, order in enumerate(orders):
            start = request * PAGES * PAGE_BYTES
            pages = PageIndices(range(PAGES), PAGE_BYTES, start), PageIndices(order, PAGE_BYTES, start)
            pair.source.submit_paged_writes(
                pair.src, pages[0], pair.dst, pages[1], PAGE_BYTES, imm=request, on_done=done
            )
        for request in draw.sample(range(REQUESTS), REQUESTS):
            counters[request].wait(PAGES, LIMIT_S)
            assert torch.equal(received[request][orders[request]], sent[request]), (call, request)
        assert done.wait(REQUESTS) == [None] * REQUESTS
        done.errors.clear()
    assert [pair.target.remove_imm_count(request) for request in range(REQUESTS)] == [(0, 0)] * REQUESTS


def test_efa_has_no_order(efa_rules):
    made = Pair([LOOPBACK])
    arrived: list[int] = []
    made.target.set_imm_callback(arrived.append)
    done = Done()
    for imm in range(500):
        made.source.submit_imm(made.dst, imm, done)
    assert done.wait(500) == [None] * 500
    wait_until(lambda: len(arrived) == 500)
    assert sorted(arrived) == list(range(500))
    assert arrived != sorted(arrived)
    made.stop()
