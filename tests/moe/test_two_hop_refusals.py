"""Two-hop calls that cannot be right are refused on all ranks, in words, and the buffer works again behind a reset."""

from __future__ import annotations

import re

import pytest
import torch
from two_hop_check import Case, bring, combine_wrong, combined_wanted, dispatch, make_buffer
from two_hop_refusals import damaged_calls, is_as_wanted, spoilt_calls

from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput
from tracekern.moe.two_hop import Config
from tracekern.moe.two_hop.handle import Handle

CASE = Case(Config(4, 1, 2, 1, 7))


def spoil(group: Group, num_nodes: int) -> tuple[dict[str, str], int]:
    return spoilt_calls(make_buffer(group, num_nodes), CASE)


def damage(group: Group, num_nodes: int) -> tuple[dict[str, str], int]:
    return damaged_calls(make_buffer(group, num_nodes), CASE)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_calls_that_differ_by_rank_or_bring_too_much_raise_the_same_everywhere(pools, num_nodes):
    answers, wrong = zip(*pools(4).call(spoil, num_nodes), strict=True)
    assert wrong == (0,) * 4
    for name in answers[0]:
        told = {answer[name] for answer in answers}
        assert all(is_as_wanted(name, text) for text in told), (name, told)
        assert len(told) == 1 or "overflow" not in name  # two ranks that differ may both be the first to say so


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_kernels_read_and_write_nothing_beyond_the_tensors_of_a_damaged_handle(pools, num_nodes):
    answers, wrong = zip(*pools(2).call(damage, num_nodes), strict=True)
    assert wrong == (0,) * 2
    assert [told for answer in answers for told in answer.items() if not is_as_wanted(*told)] == []


def damage_parts(group: Group, num_nodes: int) -> tuple[dict[str, str], int]:
    """Changes the last number of each part on all ranks alike. Returns the errors, and what is wrong afterwards."""
    buffer, told = make_buffer(group, num_nodes), {}
    brought = bring(CASE, group.num_ranks, group.rank, 1)
    received = dispatch(buffer, CASE, brought)
    for name in set(Handle._fields) - {"recv_src_meta"}:  # that is written alone
        part = getattr(received.handle, name).view(-1)
        part[-1] = ~part[-1]
        with pytest.raises(BadInput) as refused:
            buffer.combine(received.recv_x, received.handle)
        told[name] = str(refused.value)
        with pytest.raises(BadInput, match=re.escape(str(refused.value))):
            buffer.dispatch(brought.x, received.handle)
        part[-1] = ~part[-1]
    copies = Handle(*(part.clone() for part in received.handle))
    for handle in (copies, received.handle._replace(send_nvl_head=copies.send_nvl_head)):
        with pytest.raises(BadInput, match="handle has parts that no dispatch returned"):
            buffer.combine(received.recv_x, handle)
    return told, combine_wrong(buffer, received, combined_wanted(CASE, buffer.nodes, brought))


def test_a_handle_that_was_written_is_refused_before_a_launch(pools):
    for told, wrong in pools(2).call(damage_parts, 2):
        assert len(told) == 9
        assert all(re.fullmatch(r"handle\.\w+ is not as dispatch\(\) returned it; .*", text) for text in told.values())
        assert wrong == 0


def test_a_handle_that_autograd_has_kept_is_known():
    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *handle):
            ctx.save_for_backward(*handle)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            kept.append(Handle(*ctx.saved_tensors).number)
            return (grad, *[None] * 10)

    kept: list[int] = []
    handle = Handle(*(torch.zeros(2, dtype=torch.int32) for _ in range(10)))
    handle.set_number(7)
    Keep.apply(torch.ones(1, requires_grad=True), *handle).backward()
    assert kept == [7]
