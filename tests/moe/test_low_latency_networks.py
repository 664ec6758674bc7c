"""Low latency calls of real processes between hosts, pretended ones and such that have networks of their own: what they
compute, who is named where a network breaks, and what is on record."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fabric_switch
import numpy as np
import pytest
from low_latency_check import same_bits
from rank_pool import RankFailed, RankPool
from rehearsal import variables

import tracekern
from tracekern.analysis.questions.transfers import TransferCause, divide_transfer_waits
from tracekern.analysis.waits.analyze import WaitKind, analyze_waits
from tracekern.comm import communicator, network
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput, CommTimeout, NotBuilt
from tracekern.fabric import library
from tracekern.moe.experts import draw_experts
from tracekern.moe.low_latency import Buffer
from tracekern.moe.low_latency.pipeline import LowLatencyPipeline
from tracekern.moe.low_latency.reference import low_latency_reference
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import MoeShape
from tracekern.moe.workload.options import MoeRun
from tracekern.moe.workload.run import run
from tracekern.timeline.join.puts import find_carried, split_carried
from tracekern.timeline.model import OPEN_END, Int64

try:
    library.require_library()
except NotBuilt as error:
    pytest.skip(str(error), allow_module_level=True)

SMALL = {"variant": "low_latency", "ranks": 3, "tokens": 6, "hidden": 256, "experts": 6, "topk": 2, "backend": "cpu"}
LIMIT_S = 3
needs_own_hosts = pytest.mark.skipif(bool(fabric_switch.missing()), reason=fabric_switch.missing() or "can be made")


def wrong_calls(group: Group, hosts: list[int], shape: MoeShape, numbers: list[int]) -> list[int]:
    """Those of some calls whose results are not the reference's, on this rank, which makes them with hooks."""
    num_bytes = Buffer.get_low_latency_rdma_size_hint(
        shape.max_tokens, shape.hidden, group.num_ranks, shape.num_experts
    )
    buffer = Buffer(group, num_rdma_bytes=num_bytes, backend="cpu", hosts=hosts)
    experts = draw_experts(shape)
    wrong = []
    for number in numbers:
        batch = draw_batch(shape, seed=number, rank=group.rank, iteration=0, routing="zipf", uneven=True)
        use_fp8 = number % 2 == 0
        _, _, handle, _, hook = buffer.low_latency_dispatch(
            batch.x, batch.topk_idx, shape.max_tokens, shape.num_experts, use_fp8=use_fp8, return_recv_hook=True
        )
        hook()
        rows = buffer.get_next_low_latency_combine_buffer(handle)
        buffer.apply_experts(handle, experts, rows)
        out, _, _ = buffer.low_latency_combine(rows, batch.topk_idx, batch.topk_weights, handle, zero_copy=True)
        if not same_bits(out, low_latency_reference(batch, experts, use_fp8)):
            wrong.append(number)
    buffer.destroy()
    return wrong


@pytest.mark.parametrize("net", ["tcp", "shm"])
@pytest.mark.parametrize("hosts", [[0, 1], [0, 0, 1], [0, 1, 2, 1]], ids=str)
def test_calls_are_the_reference_whatever_hosts_ranks_are_on(pools, hosts, net):
    shape = MoeShape(len(hosts), 6, 2 * len(hosts), 2, 256, "bf16")
    found = pools(len(hosts)).call(with_net, net, wrong_calls, hosts, shape, list(range(6)))
    assert found == [[]] * len(hosts)


def with_net(group: Group, net: str, call: Callable[..., Any], *arguments: Any, **more: str) -> Any:
    """Calls it with an interface for proxies, and more variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TRACEKERN_NET": net, **more}.items():
            patch.setenv(name, value)
        return call(group, *arguments)


def with_efa_rules(group: Group, call: Callable[..., Any], *arguments: Any) -> Any:
    return with_net(group, "tcp", call, *arguments, **variables("efa"))


def on_own_hosts(
    group: Group, enter: list[Callable[[], None]], sources: list[str], call: Callable[..., Any], *arguments: Any
) -> Any:
    """Calls it on ranks that become part of a host each, but for the memory that they share, as hosts do not. sources:
    the addresses of their interfaces."""
    open_network, make_board = network._open, communicator.Board

    def open_there(*told: Any) -> Any:
        enter[group.rank]()
        return open_network(*told)

    def make_board_here(group: Group) -> Any:
        fabric_switch.join(os.getppid())
        board = make_board(group)
        enter[group.rank]()
        return board

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "_open", open_there)
        patch.setattr(communicator, "Board", make_board_here)
        return with_net(group, f"tcp:{sources[group.rank]}", call, *arguments)


@needs_own_hosts
@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 1, 2]], ids=str)
def test_calls_on_hosts_with_networks_of_their_own(hosts):
    shape, pool = MoeShape(3, 6, 6, 2, 256, "bf16"), RankPool(3)
    with fabric_switch.Hosts(max(hosts) + 1) as made:
        enter, sources = [made.enter(host) for host in hosts], [made.net(host).source for host in hosts]
        found = pool.call(on_own_hosts, enter, sources, wrong_calls, hosts, shape, list(range(6)))
    pool.close()
    assert found == [[]] * 3


def call_until_rank_1_is_cut_off(group: Group, hosts: list[int], how: str) -> tuple[float, str]:
    """How long the last of 20 calls took, and what this rank was told."""
    shape = MoeShape(group.num_ranks, 4, 6, 2, 256, "bf16")
    pipeline, experts = LowLatencyPipeline(group, shape, hosts=hosts, timeout_s=LIMIT_S), draw_experts(shape)
    began = time.monotonic()
    try:
        for number in range(20):
            began = time.monotonic()
            if (group.rank, number) == (1, 9):
                cut_off(how)
            batch = draw_batch(shape, seed=number, rank=group.rank, iteration=0, routing="uniform", uneven=False)
            pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts)
    except CommTimeout as error:
        return time.monotonic() - began, str(error)
    return 0.0, ""


def cut_off(how: str) -> None:
    """Takes the link of this process down, or stops the process for longer than others wait for it."""
    if how == "link down":
        subprocess.run(["ip", "link", "set", "nic", "down"], check=True)
        return
    subprocess.Popen(["sh", "-c", f"sleep {3 * LIMIT_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


@needs_own_hosts
@pytest.mark.parametrize("how", ["link down", "stopped"])
def test_a_rank_that_is_cut_off_is_named_within_the_limit(how):
    hosts, pool = [0, 1, 2], RankPool(3)
    with fabric_switch.Hosts(3) as made:
        enter, sources = [made.enter(host) for host in hosts], [made.net(host).source for host in hosts]
        found = pool.call(on_own_hosts, enter, sources, call_until_rank_1_is_cut_off, hosts, how)
    pool.close()
    for rank in (0, 2):
        seconds, text = found[rank]
        assert "rank 1" in text
        assert seconds < 2 * LIMIT_S
    assert found[1][1], "the rank itself is told, too"


def call_without_rank_1(group: Group, hosts: list[int]) -> tuple[list[bool], str]:
    """Whether calls were right before and after one from which rank 1 stays away, and what the others were told."""
    shape = MoeShape(group.num_ranks, 4, 6, 2, 256, "bf16")
    pipeline, experts = LowLatencyPipeline(group, shape, hosts=hosts, timeout_s=0.7), draw_experts(shape)

    def is_right(number: int) -> bool:
        batch = draw_batch(shape, seed=number, rank=group.rank, iteration=0, routing="uniform", uneven=False)
        out = pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts)
        return same_bits(out, low_latency_reference(batch, experts, use_fp8=True))

    right, told = [is_right(number) for number in range(10, 21)], ""
    if group.rank == 1:
        time.sleep(2.0)
    else:
        with pytest.raises(CommTimeout) as lost:
            is_right(1)
        told = str(lost.value)
    pipeline.reset()
    right += [is_right(number) for number in range(2, 8)]
    pipeline.comm.barrier()
    return right, told


@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 1, 1]], ids=str)
def test_after_a_reset_nothing_of_before_is_taken_for_new(pools, hosts):
    found = pools(3).call(call_without_rank_1, hosts)
    assert [right for right, _ in found] == [[True] * 17] * 3
    assert any("rank 1" in told for _, told in found), found


def barriers_around_new_kernels(group: Group, hosts: list[int]) -> None:
    shape = (4, 256, 6)
    num_bytes = Buffer.get_low_latency_rdma_size_hint(4, 256, group.num_ranks, 6)
    buffer = Buffer(group, num_rdma_bytes=num_bytes, backend="cpu", hosts=hosts, timeout_s=10)
    for num_barriers in range(6):
        for _ in range(num_barriers):
            buffer.comm.barrier()
        buffer.clean_low_latency_buffer(*shape)
    buffer.comm.barrier()


def test_barriers_go_on_where_kernels_begin_anew(pools):
    assert pools(2).call(barriers_around_new_kernels, [0, 1]) == [None, None]


def call_until_rank_1_is_killed(group: Group, hosts: list[int], told: Path) -> None:
    shape = MoeShape(group.num_ranks, 4, 6, 2, 256, "bf16")
    pipeline, experts = LowLatencyPipeline(group, shape, hosts=hosts, timeout_s=60), draw_experts(shape)
    started = time.monotonic()
    try:
        for number in range(20):
            if (group.rank, number) == (1, 9):
                os.kill(os.getpid(), signal.SIGKILL)
            batch = draw_batch(shape, seed=number, rank=group.rank, iteration=0, routing="uniform", uneven=False)
            pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts)
    except CommTimeout as error:
        (told / str(group.rank)).write_text(f"{time.monotonic() - started} {error}")


def test_a_rank_that_is_killed_is_named_long_before_the_limit(tmp_path):
    pool = RankPool(3)
    with pytest.raises(RankFailed, match="rank 1: the process is gone"):
        pool.call(call_until_rank_1_is_killed, [0, 1, 2], tmp_path)
    pool.close()
    for rank in (0, 2):
        seconds, text = (tmp_path / str(rank)).read_text().split(maxsplit=1)
        assert "rank 1" in text
        assert float(seconds) < 30


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> tracekern.Timeline:
    """Calls of three ranks of two hosts, where the proxy of rank 2 is late."""
    directory = tmp_path_factory.mktemp("two-hosts")
    options = MoeRun(**SMALL, transport="fabric", link_nodes=2, iterations=4, late_proxy=2, late_us=30_000)
    run(options, directory).raise_for_error()
    return tracekern.load(directory)


def far_flows(timeline: tracekern.Timeline) -> Int64:
    """Those between hosts, but for the barrier before the first call, which no proxy has on record."""
    node = {rank.rank: rank.node for rank in timeline.ranks}
    of_span = np.array([node[track.rank] for track in timeline.tracks])[timeline.spans.track]
    flows = timeline.flows
    is_call = np.array([event.name != "wait_barrier" for event in timeline.events])[timeline.spans.event[flows.wait]]
    return np.flatnonzero((of_span[flows.signal] != of_span[flows.wait]) & is_call)


def test_a_run_on_two_hosts_has_their_nodes_and_no_wait_without_a_signal(two_hosts):
    assert len({rank.node for rank in two_hosts.ranks}) == 2
    unmatched = analyze_waits(two_hosts).kind == WaitKind.UNMATCHED
    assert not np.any(unmatched), "what waits for flags that proxies raise has the signals of the other host"


def test_arrows_between_hosts_lead_through_commands_and_puts(two_hosts):
    carried, spans, flows = find_carried(two_hosts), two_hosts.spans, two_hosts.flows
    assert len(carried) > 50
    assert carried.flow.tolist() == far_flows(two_hosts).tolist()
    names = np.array([event.name for event in two_hosts.events])
    assert set(names[spans.event[carried.put]].tolist()) >= {"put_message", "put_count"}
    assert (names[spans.event[carried.command]] == "command").all()
    # Also the clock of rank 2 is asked by way of its late proxy.
    doubt = 2_000_000 + sum(rank.clock.hard_ns + rank.clock.host_hard_ns for rank in two_hosts.ranks)
    signal, wait, came = flows.signal[carried.flow], flows.wait[carried.flow], carried.came
    assert (spans.start[signal] <= spans.start[carried.put] + doubt).all()
    assert (spans.end[carried.command] <= came + doubt)[came != OPEN_END].all()
    assert (came <= spans.end[wait] + doubt).all()
    arrows = set(zip(*(end.tolist() for end in vars(split_carried(two_hosts).flows).values()), strict=True))
    assert arrows >= set(zip(signal.tolist(), carried.command.tolist(), strict=True))
    assert arrows >= set(zip(carried.put.tolist(), wait.tolist(), strict=True))
    assert not arrows & set(zip(signal.tolist(), wait.tolist(), strict=True))


def test_what_a_late_proxy_holds_up_is_told_from_late_kernels(two_hosts):
    waits = divide_transfer_waits(two_hosts)
    assert sum(waits.of(cause) for cause in TransferCause).tolist() == waits.wait_ns.tolist()
    not_taken = [waits.writes.not_taken_ns[waits.writes.source == rank] for rank in range(3)]
    assert np.median(not_taken[2]) > 10e6 > np.median(np.concatenate(not_taken[:2]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"link_nodes": 4}, "nodes is 4; for a network wanted 2 to 3, the ranks"),
        ({"variant": "two_hop"}, "transport is fabric; variant two_hop has none, only low_latency"),
        ({"slow_link": 1.0}, "transport is fabric and slow-link 1; take one of them"),
        ({"transport": "air"}, "transport is 'air'; wanted one of memory, fabric"),
        ({"transport": "memory", "late_proxy": 1}, "late-proxy is 1 and transport memory"),
        ({"link_nodes": 2, "late_proxy": 3}, "late-proxy is 3; wanted -1 to 2"),
    ],
)
def test_a_run_without_such_a_network_is_refused(options, said):
    with pytest.raises(BadInput, match=re.escape(said)):
        MoeRun(**{**SMALL, "transport": "fabric", **options})


def make_with_hosts(group: Group, hosts: Any) -> str:
    with pytest.raises(BadInput) as refused:
        Buffer(group, num_rdma_bytes=1 << 20, backend="cpu", hosts=hosts)
    return str(refused.value)


@pytest.mark.parametrize(
    ("hosts", "said"), [([0], "hosts is [0]; wanted a number for each of 2 ranks"), ([0, True], "hosts is [0, True]")]
)
def test_hosts_that_are_none_are_refused(pools, hosts, said):
    assert all(said in told for told in pools(2).call(make_with_hosts, hosts))


def test_a_network_that_is_not_there_is_named(pools):
    (first, second) = pools(2).call(with_net, "verbs", make_with_hosts, [0, 1])
    assert first == second
    assert "network: provider verbs" in first


def system_library() -> str:
    """Debian 12's libfabric, whose tcp tells a wrong source where there are several peers; "" where that is not it."""
    found = "/usr/lib/x86_64-linux-gnu/libfabric.so.1"
    return found if Path(found).exists() and library.native().library_version(found) == "1.17" else ""


def with_library(group: Group, path: str, call: Callable[..., Any], *arguments: Any) -> Any:
    return with_net(group, "tcp", call, *arguments, TRACEKERN_LIBFABRIC=path)


@pytest.mark.skipif(not system_library(), reason="Debian 12's libfabric is not here")
def test_a_network_that_tells_wrong_sources_is_refused(pools):
    told = pools(3).call(with_library, system_library(), make_with_hosts, [0, 1, 2])
    assert all("network: provider tcp of libfabric 1.17 does not tell who a write is from" in text for text in told)
