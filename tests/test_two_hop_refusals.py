"""Two-hop calls that cannot be right are refused on all ranks, in words, and the buffer works again behind a reset."""

from __future__ import annotations

import re

import pytest
from two_hop_check import Case, bring, combine_wrong, combined_wanted, dispatch, make_buffer

from tracekern.comm.group import Group
from tracekern.errors import BadInput
from tracekern.moe.two_hop import Config
from tracekern.moe.two_hop.handle import Handle

CASE = Case(Config(4, 1, 2, 1, 7))


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
    return told, combine_wrong(buffer, received, combined_wanted(CASE, buffer.nodes, brought))


def test_a_handle_that_was_written_is_refused_before_a_launch(pools):
    for told, wrong in pools(2).call(damage_parts, 2):
        assert len(told) == 9
        assert all(re.fullmatch(r"handle\.\w+ is not as dispatch\(\) returned it; .*", text) for text in told.values())
        assert wrong == 0
