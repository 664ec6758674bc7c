"""The engine under the rules of EFA (cpp/efa_rules.cpp), which tcp has here."""

from __future__ import annotations

import pytest
import torch
from fabric_pairs import LIMIT_S, LOOPBACK, Done, engine

from tracekern.errors import NotBuilt
from tracekern.fabric import GroupTransferRouting, Net, PageIndices, ScatterSlice

NUM_BYTES = (5 << 20) + 100
"""Size of a write, which is longer than the 1 MiB that a device takes at once."""


def test_a_write_longer_than_a_device_takes_counts_once_a_shard_after_its_bytes(efa_rules):
    nets = [LOOPBACK, Net("tcp", "127.0.0.2")]
    source, target = engine(nets), engine(nets)
    sent, received = torch.zeros(NUM_BYTES, dtype=torch.uint8), torch.zeros(NUM_BYTES, dtype=torch.uint8)
    (src, _), (_, dst) = source.register_tensor(sent), target.register_tensor(received)
    counter, done = target.make_imm_counter(1), Done()
    for call in range(10):
        sent.fill_(call + 1)
        source.submit_write(src, dst, NUM_BYTES, imm=1, on_done=done)
        counter.wait(2, LIMIT_S)
        assert torch.equal(received, sent), call
    pages = PageIndices([0, 1], NUM_BYTES // 2)
    sent.random_(0, 256)
    source.submit_paged_writes(src, pages, dst, pages, NUM_BYTES // 2, imm=1, on_done=done)
    counter.wait(2, LIMIT_S)
    assert torch.equal(received, sent)
    sent.random_(0, 256)
    group = source.add_peer_group([dst])
    slices, routing = [ScatterSlice(NUM_BYTES)], GroupTransferRouting.shard_bytes()
    source.submit_scatter(group, src, slices, imm=1, routing=routing, on_done=done)
    counter.wait(2, LIMIT_S)
    assert torch.equal(received, sent)
    source.submit_write(src, dst, NUM_BYTES, on_done=done)
    assert done.wait(13) == [None] * 13
    assert target.remove_imm_count(1) == (0, 0)
    source.stop()
    target.stop()


def test_a_library_that_does_not_load_is_named_with_its_variable(monkeypatch):
    monkeypatch.setenv("TRACEKERN_LIBFABRIC", "/nowhere/libfabric.so.1")
    wrong = "TRACEKERN_LIBFABRIC: /nowhere/.* cannot be loaded: .*; set it to the path of a libfabric.so.1, or unset it"
    with pytest.raises(NotBuilt, match=wrong):
        engine([LOOPBACK])
