"""Transfer engines beside GPUs: words that kernels write and hosts watch, and transfers on the kernels' time axis."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from fabric_pairs import LIMIT_S, NETS, Pair, engine

from tests.devices import one_rank, require_gpus
from tests.paths import ROOT

sys.path.insert(0, str(ROOT))
from examples.kv_cache.decoder import Decoder
from examples.kv_cache.main import LAYOUT, MAX_PAGES, make_engine
from examples.kv_cache.main import NETS as ONE_NET
from examples.kv_cache.prefiller import Prefiller
from tracekern.fabric import DoneFlag
from tracekern.record.session import capture
from tracekern.timeline.load import load
from tracekern.timeline.model import TrackKind

COUNT_UP = r"""
extern "C" __global__ void count_up(volatile unsigned long long* word, int times) {
    for (int i = 0; i < times; ++i) {
        *word = *word + 1;
        __threadfence_system();
    }
}
"""


def require_gpu() -> None:
    require_gpus(1)
    torch.cuda.init()


@pytest.mark.gpu
def test_a_kernel_tells_a_host_that_watches():
    require_gpu()
    count_up = torch.cuda._compile_kernel(COUNT_UP, "count_up")
    own, seen, is_there = engine(NETS["tcp"]), [], threading.Event()

    def look(old: int, new: int) -> bool:
        seen.append((old, new))
        if new == 100 * 1000:
            is_there.set()
        return new < 100 * 1000

    word = own.alloc_scalar_watcher(look)
    assert word.tensor.is_pinned()
    for _ in range(100):
        count_up(args=(word.tensor, 1000))
    assert is_there.wait(LIMIT_S)
    assert seen[0][0] == 0
    assert all(old < new for old, new in seen)
    assert all(before[1] == after[0] for before, after in zip(seen, seen[1:], strict=False))
    own.stop()


@pytest.mark.gpu
def test_transfers_lie_between_the_kernels_that_they_came_between(tmp_path: Path):
    require_gpu()
    pipeline, tensors = one_rank()
    pair = Pair(NETS["tcp"])
    counter = pair.target.make_imm_counter(1)
    device = pipeline.comm.device
    with capture(tmp_path, device=device) as session, pair.source.traced(session), pair.target.traced(session):
        for _ in range(20):
            pipeline(*tensors, capture=session)
            pipeline.synchronize()
            pair.source.submit_write(pair.src, pair.dst, 1 << 16, imm=1, on_done=(done := DoneFlag()))
            counter.wait(1, LIMIT_S)
            done.wait(LIMIT_S)
    pair.stop()
    timeline = load(tmp_path)
    assert timeline.problems == ()
    spans = timeline.spans
    kernels = np.flatnonzero(timeline.tracks_of(TrackKind.LAUNCH)[spans.track])
    kernels = kernels[np.argsort(spans.start[kernels])].reshape(20, -1)
    transfers = timeline.rows_of("transfer")
    clock = timeline.ranks[0].clock
    assert clock is not None
    slack = clock.host_hard_ns
    assert slack < 20_000
    assert (spans.end[kernels[:, -1]] <= spans.start[transfers] + slack).all()
    assert (spans.end[transfers][:-1] <= spans.start[kernels[1:, 0]] + slack).all()


@pytest.mark.gpu
def test_layers_of_a_cuda_graph_count_up_the_word_behind_which_their_pages_are_written():
    require_gpu()
    decoder = Decoder(make_engine(ONE_NET["tcp"]), LAYOUT)
    prefiller = Prefiller(make_engine(ONE_NET["tcp"]), LAYOUT, MAX_PAGES, device="cuda")
    link = decoder.add_prefiller("prefiller 1", prefiller.engine.main_address, prefiller.pulse)
    for seed in range(20):
        with decoder.fetch(link, seed, MAX_PAGES, LIMIT_S) as cache:
            assert cache.wrong_bytes(seed) == 0
    assert int(prefiller._word.tensor) == 20 * LAYOUT.layers
    prefiller.stop()
    decoder.stop()
