"""Two-hop dispatch through the Python API and the command line, on real rank processes and resident ranks."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from typing import Any

import numpy as np
import pytest
import torch
from two_hop_check import Case, bring, dispatch, make_buffer, num_wrong, wanted

import tracekern
from tests.paths import ROOT
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput, CallBroken, CommTimeout
from tracekern.launcher.launch import launch_ranks
from tracekern.moe.experts import draw_experts
from tracekern.moe.shape import MoeShape
from tracekern.moe.two_hop import Buffer, Config
from tracekern.moe.two_hop.counts import CountsPoll
from tracekern.moe.two_hop.handle import Handle
from tracekern.moe.two_hop.layout import Nodes
from tracekern.moe.two_hop.reference import count_wrong, node_reduced_reference
from tracekern.moe.two_hop.settings import FACTS, Layout
from tracekern.timeline.model import EventClass

SMALLEST = Config(2, 1, 1, 1, 7)
CASES = (
    Case(SMALLEST),
    Case(SMALLEST, one_rank=True, topk=1),
    Case(Config(6, 2, 5, 3, 9), is_fp8=True, alignment=4),
    Case(Config(4, 6, 8, 4, 12), hidden=8, experts_each=1, topk=2, has_topk=False),
    Case(SMALLEST, tokens=64),
)

# ---- layout ----


def test_parts_of_the_symmetric_buffer_lie_as_in_the_published_picture():
    """2 channels and 3 nodes: the send parts of channel 1 are 3 to 5, its receive parts 9 to 11."""
    parts = [FACTS.sym_buffer(1, 3, 2, 1, node) for node in range(3)]
    assert parts == [(3, 9), (4, 10), (5, 11)]
    assert FACTS.sym_buffer(256, 3, 2, 1, 2) == (5 * 256, 11 * 256)


def test_parts_of_the_asymmetric_buffer_are_where_the_writer_and_the_reader_look():
    """Target 2 reads in channel 1 what peer 1 writes there, one of 4 peers."""
    assert FACTS.asym_buffer(1, 4, 3, 1, 1) == 5
    assert FACTS.asym_buffer(384, 4, 3, 1, 1) == 5 * 384
    parts = {FACTS.asym_buffer(1, 4, 3, channel, peer) for channel in range(3) for peer in range(4)}
    assert parts == set(range(12))


def test_size_hints_are_enough_for_every_call_of_that_size():
    for num_ranks, num_nodes in ((8, 2), (16, 2), (3, 3)):
        config = Buffer.get_dispatch_config(num_ranks)
        hint = config.get_nvl_buffer_size_hint(1024, num_ranks, num_nodes) + config.get_rdma_buffer_size_hint(
            1024, num_ranks, num_nodes
        )
        nodes = Nodes.of(num_ranks, num_nodes)
        needs = [
            Layout(num_ranks * experts, topk, hidden, is_fp8, config).heap_bytes(nodes, 64)
            for experts, topk in ((1, 0), (60, 128))
            for hidden, is_fp8 in ((512, False), (1024, True))
        ]
        assert max(needs) <= hint < 2 * max(needs)


# ---- results ----


def run_cases(group: Group, num_nodes: int) -> list[int]:
    """Elements that are wrong in each case, of two calls with nothing in between."""
    buffer = make_buffer(group, num_nodes)
    wrong = [sum(num_wrong(buffer, case, seed) for seed in (1, 2)) for case in CASES]
    buffer.destroy()
    return wrong


@pytest.mark.parametrize(("num_ranks", "num_nodes"), [(4, 2), (4, 1), (3, 3)])
def test_what_arrives_is_what_the_oracle_says(pools, num_ranks, num_nodes):
    assert pools(num_ranks).call(run_cases, num_nodes) == [[0] * len(CASES)] * num_ranks


def worst_case(group: Group) -> tuple[int, int, list[int], str]:
    buffer, case = make_buffer(group, 2), CASES[0]
    given = bring(case, group.num_ranks, group.rank, 3)
    received = dispatch(buffer, case, given, num_worst_tokens=100)
    buffer.synchronize()
    expected = wanted(case, buffer.nodes, group.rank, 3)
    rows = len(expected.recv_x)
    wrong = sum(
        int((got[:rows].view(torch.uint8) != want.view(torch.uint8)).sum())
        for got, want in (
            (received.recv_x, expected.recv_x),
            (received.recv_topk_idx, expected.recv_topk_idx),
            (received.handle.recv_src_meta, expected.handle.recv_src_meta),
        )
    )
    sizes = {len(received.recv_x), len(received.recv_topk_idx), len(received.handle.send_nvl_head)}
    assert int(received.handle.recv_gbl_rank_prefix_sum[-1]) == rows
    assert (received.recv_topk_idx[rows:] == -1).all()
    told = ""
    dispatch(buffer, case, given, num_worst_tokens=1)
    try:
        buffer.synchronize()
    except BadInput as error:
        told = str(error)
    wrong += num_wrong(buffer, case, 4)  # and calls go on
    return wrong, *sizes, received.num_recv_tokens_per_expert_list, told


def test_with_worst_case_memory_nobody_polls_and_more_rows_are_an_error(pools):
    for rank, (wrong, rows, counts, told) in enumerate(pools(4).call(worst_case)):
        assert (wrong, rows, counts) == (0, 100, [])
        assert re.fullmatch(rf"rank {rank}: \d+ tokens came, .* num_worst_tokens was less; .* at least \d+", told)


def test_a_single_bit_that_differs_is_counted():
    case, nodes = CASES[2], Nodes(2, 2)
    right = wanted(case, nodes, 0, 1)
    assert count_wrong(wanted(case, nodes, 0, 1), right) == 0
    for name in ("recv_x", "recv_x_scales", "recv_topk_idx", "recv_topk_weights", *Handle._fields):
        other = wanted(case, nodes, 0, 1)
        tensor = getattr(other.handle if name in Handle._fields else other, name)
        tensor.view(torch.uint8).flatten()[-1] ^= 1
        assert count_wrong(other, right) == 1, name
    fewer = dataclasses.replace(right, recv_x=right.recv_x[:-1], num_recv_tokens_per_expert_list=[])
    assert count_wrong(fewer, right) == right.recv_x.numel() + 1


def test_a_host_that_is_told_nothing_gives_up():
    poll = CountsPoll(alone().comm, lambda ticket, limit_us: time.sleep(limit_us * 1e-6))
    with (
        pytest.raises(
            CommTimeout, match=r"rank 0 dispatch gave up on notify_dispatch after 1\.\d+ s: the kernel has told"
        ),
        poll.started(1, 0.01, None, lambda counts: None) as waiting,
    ):
        waiting.result()


def test_a_notify_that_is_refused_leaves_no_thread_that_waits():
    poll = CountsPoll(alone().comm, lambda ticket, limit_us: time.sleep(limit_us * 1e-6))
    with pytest.raises(BadInput), poll.started(1, 100.0, None, lambda counts: None) as waiting:
        raise BadInput("no launch")
    assert waiting.result(5.0) is None


# ---- bad input ----


def alone(**how: Any) -> Buffer:
    return Buffer(Group(0, 1), **{"num_rdma_bytes": 1 << 20, "backend": "cpu", "num_max_tokens_per_rank": 8, **how})


def arguments(num_tokens: int = 4) -> dict[str, Any]:
    return {
        "x": torch.ones((num_tokens, 64), dtype=torch.bfloat16),
        "num_tokens_per_rank": torch.tensor([num_tokens], dtype=torch.int32),
        "num_tokens_per_rdma_rank": torch.tensor([num_tokens], dtype=torch.int32),
        "is_token_in_rank": torch.ones((num_tokens, 1), dtype=torch.bool),
        "num_tokens_per_expert": torch.tensor([num_tokens, num_tokens], dtype=torch.int32),
        "topk_idx": torch.tensor([[0, 1]] * num_tokens),
        "topk_weights": torch.ones((num_tokens, 2)),
        "config": SMALLEST,
    }


HANDLE = Handle(*[torch.zeros(1)] * 10)


NEW_CALL = (
    *("num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank", "num_tokens_per_expert"),
    *("topk_idx", "topk_weights"),
)
"""What a dispatch is given without a handle alone."""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"handle": HANDLE}, "handle is given, and num_tokens_per_rank"),
        (
            {"handle": (1,), **dict.fromkeys(NEW_CALL)},
            "handle is tuple; wanted the one that dispatch() returned",
        ),
        ({"num_tokens_per_rank": None}, "num_tokens_per_rank is missing; get_dispatch_layout() returns it"),
        ({"topk_weights": None}, "one of topk_idx and topk_weights is missing"),
        ({"topk_idx": torch.zeros((4, 2), dtype=torch.int32)}, "topk_idx is torch.int32 [4, 2]; wanted torch.int64"),
        ({"topk_idx": torch.tensor([[0, 1], [0, 1], [0, 2], [0, 1]])}, "topk_idx[2, 1] is expert 2; wanted -1"),
        ({"x": torch.ones((4, 64))}, "x is torch.float32 [4, 64]; wanted torch.bfloat16"),
        ({"x": torch.ones((4, 60), dtype=torch.bfloat16)}, "hidden is 60; wanted a multiple of 8"),
        (
            {"x": (torch.ones((4, 64)).to(torch.float8_e4m3fn), torch.ones((4, 1)))},
            "hidden is 64; fp8 has a scale for 128 values",
        ),
        ({"x": torch.ones((64, 4), dtype=torch.bfloat16).T}, "x is not contiguous"),
        ({"is_token_in_rank": torch.ones((3, 1), dtype=torch.bool)}, "is_token_in_rank is torch.bool [3, 1]; wanted"),
        ({"is_token_in_rank": torch.zeros((4, 1), dtype=torch.bool)}, "num_tokens_per_rank[0] is 4; is_token_in_rank"),
        (
            {"num_tokens_per_expert": torch.tensor([4, 3], dtype=torch.int32)},
            "num_tokens_per_expert[1] is 3; topk_idx names it 4 times",
        ),
        ({"config": Config(2, 6, 8194, 6, 258)}, "num_nvl_bytes + num_rdma_bytes is 1048576; a call with 2 experts"),
        (arguments(9), "x has 9 tokens; the buffer was made with num_max_tokens_per_rank=8"),
    ],
)
def test_bad_input_is_told_before_a_launch(change, told):
    """In the first call, and in a later one."""
    buffer = alone()
    with pytest.raises(BadInput, match=re.escape(told)):
        buffer.dispatch(**{**arguments(), **change})
    assert buffer.dispatch(**arguments())[3] == [4, 4]
    with pytest.raises(BadInput, match=re.escape(told)):
        buffer.dispatch(**{**arguments(), **change})
    assert buffer.dispatch(**arguments())[3] == [4, 4]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"num_nodes": 2}, "1 ranks on 2 nodes; wanted as many on each"),
        ({"num_nodes": 0}, "num_nodes is 0; wanted 1 to 16"),
        ({"low_latency_mode": True}, "low_latency_mode is True; that is tracekern.moe.calls.buffer.Buffer"),
        ({"num_nvl_bytes": -1}, "num_nvl_bytes is -1; wanted 0"),
        ({"num_max_tokens_per_rank": 1 << 20}, "num_max_tokens_per_rank is 1048576; wanted 1 to 1048575"),
    ],
)
def test_no_buffer_is_made_of_bad_input(how, told):
    with pytest.raises(BadInput, match=re.escape(told)):
        alone(**how)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ((3,), "num_sms is 3; wanted an even number"),
        ((130,), "num_sms is 130; wanted 2 to 128"),
        ((20, 6, 5), "num_max_nvl_chunked_recv_tokens is 5; wanted at least num_max_nvl_chunked_send_tokens, 6"),
        (
            (20, 6, 6, 2, 7),
            "num_max_rdma_chunked_recv_tokens is 7; wanted at least 8, num_max_rdma_chunked_send_tokens",
        ),
        ((20, 6, 6, 2, 9), "wanted a multiple of num_max_rdma_chunked_send_tokens, 2"),
        ((20, 6, 1 << 14), "num_max_nvl_chunked_recv_tokens is 16384; wanted 1 to 16383"),
    ],
)
def test_no_config_has_rings_that_kernels_cannot_work_with(config, told):
    with pytest.raises(BadInput, match=re.escape(told)):
        Config(*config)


def differ(group: Group) -> list[str]:
    """Rank 1 comes with another config than the rest, first of all and then to calls of a known kind."""
    buffer, told = make_buffer(group, 2, timeout_s=5.0), []
    other = Case(Config(4, 1, 1, 1, 7)) if group.rank == 1 else CASES[0]
    try:
        num_wrong(buffer, other, 1)
    except BadInput as error:
        told.append(str(error))
    told.append(f"{num_wrong(buffer, CASES[0], 1)} wrong")
    return told


def test_ranks_that_differ_are_told_so_and_go_on(pools):
    for told in pools(4).call(differ):
        assert told == ["num_sms is 2 on rank 0 and 4 on rank 1", "0 wrong"]


def combine_badly(group: Group) -> dict[str, str]:
    """Calls combine with wrong arguments, refused before a launch, then with right ones. Returns the errors."""
    buffer, case, told = make_buffer(group, 2), CASES[0], {}
    given = bring(case, group.num_ranks, group.rank, 1)

    def refuse(name: str, *args: Any, **how: Any) -> None:
        with pytest.raises(BadInput) as refused:
            buffer.combine(*args, **how)
        told[name] = str(refused.value)

    nothing = torch.empty((0, case.hidden), dtype=torch.bfloat16)
    parts = [torch.empty(0)] * 10
    refuse("too early", nothing, tuple(parts))
    received = dispatch(buffer, case, given)
    x, handle = received.recv_x, received.handle
    with pytest.raises(BadInput) as refused:
        buffer.dispatch(torch.cat([given.x, given.x[:1], given.x.new_ones((1, case.hidden))]), handle)
    told["cached tokens"] = str(refused.value)
    refuse("no handle", x, None)
    refuse("other handle", x, handle._replace(send_rdma_head=handle.send_rdma_head[:, :1]))
    refuse("rows", torch.zeros((len(x) + 1, case.hidden), dtype=torch.bfloat16), handle)
    refuse("dtype", x.float(), handle)
    refuse("config", x, handle, config=Config(4, 1, 1, 1, 7))
    refuse("bias", x, handle, bias=x.new_zeros((len(given.x) + 1, case.hidden)))
    told["right"] = str(num_wrong(buffer, case, 2))
    buffer.destroy()
    refuse("destroyed", x, handle)
    return told


def test_a_wrong_combine_is_refused_before_a_launch(pools):
    wanted = {
        "too early": "nothing was dispatched; a call with a handle goes the way of a dispatch",
        "cached tokens": "the dispatch of the handle had bf16 [",
        "no handle": "handle is NoneType; wanted the one that dispatch() returned",
        "other handle": "handle.send_rdma_head is torch.int32",
        "rows": "x is torch.bfloat16",
        "dtype": "x is torch.float32",
        "config": "the dispatch had Config",
        "bias": "bias is torch.bfloat16 [",
        "right": "0",
        "destroyed": "the buffer was destroyed; make another one",
    }
    for told in pools(4).call(combine_badly):
        assert told.keys() == wanted.keys()
        assert [name for name, text in wanted.items() if text not in told[name]] == []


def test_sums_by_node_are_near_the_plain_sum():
    """Each row is rounded once, the sum of a node once more, and that of all nodes: three times half of 2^-7."""
    nodes, num_tokens, num_experts = Nodes.of(8, 2), 200, 16
    draw = torch.Generator().manual_seed(1)
    x = torch.randn((num_tokens, 64), generator=draw).to(torch.bfloat16)
    ids = torch.rand((num_tokens, num_experts), generator=draw).argsort(1)[:, :6]
    weights = torch.rand((num_tokens, 6), generator=draw)
    experts = draw_experts(MoeShape(8, num_tokens, num_experts, 6, 64, "bf16"))
    found = node_reduced_reference(x, ids, weights, experts, nodes).float()
    plain = x.float() * (weights * experts.scale[ids]).sum(1, keepdim=True)
    assert ((found - plain).abs() <= 3.1 * 2**-8 * plain.abs() + 1e-6).all()
    assert not torch.equal(found, plain)


# ---- traces ----


def record(group: Group, directory: str) -> None:
    buffer = make_buffer(group, 2)
    num_wrong(buffer, CASES[4], 1)
    with tracekern.capture(directory, device=buffer.comm.device, records_per_track=2000) as session:
        wrong = num_wrong(buffer, CASES[4], 2, capture=session)
    assert wrong == 0


@pytest.fixture(scope="module")
def recorded(pools, tmp_path_factory) -> tracekern.Timeline:
    directory = tmp_path_factory.mktemp("two_hop") / "capture"
    pools(4).call(record, str(directory))
    return tracekern.load(directory)


def test_a_capture_has_every_step_and_what_the_second_thread_did(recorded):
    assert not recorded.problems
    kernels = ["combine", "dispatch", "notify_dispatch"]
    assert sorted({launch.name for launch in recorded.launches}) == kernels
    steps = {"wait_ring_space", "copy_to_ring", "forward_token", "receive_token", "return_credit"}
    steps |= {"send_row", "signal_return_tail", "sum_in_node", "return_row_credit", "reduce_token", "wait_reduced"}
    assert steps | {"notify", "wait_sequential_lock", "wait_tail"} <= {
        recorded.events[number].name for number in np.unique(recorded.spans.event)
    }
    assert set(recorded.host_names) == {"poll_counts", "allocate_recv"}


def test_heads_count_from_the_slots_of_their_ring(recorded):
    """A wait for room that there is from the beginning waits for nobody."""
    initial = {
        event.channel.name: event.channel.initial
        for event in recorded.events
        if event.channel is not None and event.channel.initial
    }
    assert initial == {"head": 7, "peer_head": 1, "return_head": 1}
    waits = [event.name for event in recorded.events if event.event_class == EventClass.WAIT]
    assert {"wait_ring_space", "wait_peer_ring"} <= set(waits)


# ---- a peer that does not come ----


def without_rank_1(group: Group, directory: str) -> tuple[list[str], int]:
    """Rank 1 does not call at first, then leaves a call between its kernels."""
    buffer, case, told = make_buffer(group, 2), CASES[4], []
    num_wrong(buffer, case, 1)

    def leave(stage: str) -> None:
        raise InterruptedError(f"behind {stage}")

    with tracekern.capture(directory, device=buffer.comm.device, keep="last") as session:
        if group.rank == 1:
            time.sleep(1.5)
        else:
            with pytest.raises(CommTimeout) as lost:
                num_wrong(buffer, case, 2, timeout_s=0.4, capture=session)
            told.append(str(lost.value))
    buffer.reset()
    if group.rank == 1:
        with pytest.raises(InterruptedError):
            num_wrong(buffer, case, 2, after_stage=leave)
        with pytest.raises(CallBroken, match="behind notify_dispatch"):
            num_wrong(buffer, case, 2)
    else:
        with pytest.raises(CommTimeout) as lost:
            num_wrong(buffer, case, 2, timeout_s=0.4)
        told.append(str(lost.value))
    buffer.reset()
    return told, num_wrong(buffer, case, 3)


def test_a_silent_peer_is_named_with_its_node_and_the_ring(pools, tmp_path):
    results = pools(4).call(without_rank_1, str(tmp_path / "capture"))
    assert [wrong for _, wrong in results] == [0] * 4
    gone, left = zip(*(told for told, _ in results if told), strict=True)
    waits = "(gave up on|stopped waiting for) rank 1 of node 0 after"
    assert any(re.search(rf"notify_dispatch .* {waits} .*; channel (peer_)?counts slot", text) for text in gone), gone
    ring = r"channel \w+ of dispatch channel 0: wanted .*; ring (rdma|nvl) of \w+ is at head \d+, tail \d+"
    # Which wait is the first to be over differs: of those for rank 1, or of those behind them.
    waits = waits.replace("rank 1 of node 0", r"rank \d of node \d")
    assert any(re.search(rf"dispatch .* {waits} .*; {ring}", text) for text in left), left
    assert any("rank 1 is out of use" in text for text in left), left
    timeline = tracekern.load(tmp_path / "capture")
    assert any(re.search(waits, problem.text) for problem in timeline.problems)
    assert "wait_counts" in {timeline.events[number].name for number in np.unique(timeline.spans.event)}


# ---- resident ranks and the command line ----


def test_resident_ranks_have_their_memory_before_the_launch(tmp_path):
    lines: list[str] = []
    exits = launch_ranks(
        4,
        "tests.two_hop_gpu:many_calls",
        env={
            "TWO_HOP": "2 20 cpu",
            "TWO_HOP_CAPTURE": str(tmp_path),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        },
        on_line=lambda _, line: lines.append(line),
        timeout_s=100,
        resident=True,
    )
    assert [end.returncode for end in exits] == [0] * 4, lines
    assert sum(": 20 calls, 0 wrong" in line for line in lines) == 4, lines
    timeline = tracekern.load(tmp_path)
    host = [row for row, event in enumerate(timeline.events) if event.event_class == EventClass.HOST]
    spans = np.flatnonzero(np.isin(timeline.spans.event, host))
    names = [timeline.host_names[int(timeline.spans.begin_payload[span])] for span in spans]
    assert sorted(set(names)) == ["allocate_recv", "poll_counts"]
    assert timeline.track_ranks()[timeline.spans.track[spans]].tolist().count(3) == 2  # on their own rank's lanes


SMALL = ("--ranks", 4, "--tokens", 20, "--hidden", 64, "--experts", 8, "--topk", 3, "--backend", "cpu")


def test_a_run_is_checked_bit_by_bit_and_a_late_rank_is_seen(command_line, tmp_path):
    options = ("--nodes", 2, "--channels", 2, "--rdma-send", 2, "--rdma-recv", 8, "--nvl-send", 2, "--nvl-recv", 4)
    late = ("--late-rank", 1, "--late-us", 100_000)
    result = command_line("run", "moe", "--variant", "two_hop", *SMALL, *options, *late, "-o", tmp_path / "capture")
    assert result.returncode == 0, result.stderr
    assert "every result equals the node reduced reference, bit by bit" in result.stdout
    assert "on 2 nodes, in 2 channels" in result.stdout
    assert "for rank 1" in result.stdout
    settings = tracekern.load(tmp_path / "capture").ranks[0].metadata["settings"]
    assert {"variant": "two_hop", "nodes": 2, "channels": 2, "rdma_recv": 8}.items() <= settings.items()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--nodes", 3), "4 ranks on 3 nodes"),
        (("--blocks", 3), "blocks is 3; wanted an even number"),
        (("--rdma-send", 2, "--rdma-recv", 7), "--rdma-recv is 7; wanted at least 8, rdma-send + 6"),
    ],
)
def test_bad_options_end_a_run_with_2(command_line, options, told):
    result = command_line("run", "moe", "--variant", "two_hop", *SMALL, "--no-trace", *options)
    assert (result.returncode, told in result.stderr) == (2, True), result.stderr
    assert result.stderr.count("\n") == 1


# ---- the page ----


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "two_hop.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "prefill.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    exits = launch_ranks(4, "prefill:prefill", env=env, on_line=lambda _, line: lines.append(line), timeout_s=100)
    assert [end.returncode for end in exits] == [0] * 4, lines
    assert set(tracekern.load(tmp_path / "prefill-capture").host_names) == {"poll_counts", "allocate_recv"}
