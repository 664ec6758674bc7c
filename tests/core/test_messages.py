"""What ranks say to each other: JSON, bytes and arrays, and nothing that could run code."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest

from tests.rank_pool import RankPool
from tracekern.comm.ranks import messages
from tracekern.comm.ranks.group import Group, losing_peers
from tracekern.errors import PeerLost


@pytest.mark.parametrize("value", [None, True, -(1 << 63), 0.1, "ä\0\ud800", [], {"a": [1, {"b": ""}]}, b"", b"\0\xff"])
def test_a_value_comes_back_as_it_was(value: object):
    assert messages.decode(messages.encode(value)) == value


@pytest.mark.parametrize("dtype", ["<i8", ">u2", "?", "<f4"])
def test_an_array_comes_back_as_it_was(dtype: str):
    array = np.arange(12).astype(dtype).reshape(3, 4)[:, ::2]
    back = messages.decode(messages.encode({"array": array}))["array"]
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype
    back[:] = 0  # it is the receiver's own


def test_tuples_come_back_as_lists():
    assert messages.decode(messages.encode((1, (2, b"3")))) == [1, [2, b"3"]]


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()]), np.array(["text"])])
def test_anything_else_cannot_be_sent(value: object):
    with pytest.raises(TypeError, match="cannot be sent to other ranks; wanted JSON, bytes or an array of numbers"):
        messages.encode(value)


@pytest.mark.parametrize("dtype", ["O", "V8", "U4"])
def test_an_array_of_something_else_is_not_made(dtype: str):
    sent = messages.encode(np.arange(4)).replace(b'"<i8"', f'"{dtype}"'.encode())
    with pytest.raises(ValueError, match="wanted numbers"):
        messages.decode(sent)


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return open, ("/nonexistent/trap",)


def test_a_pickled_object_is_not_unpacked():
    with pytest.raises(ValueError, match="codec can't decode"):
        messages.decode(pickle.dumps(Trap()))


def gather_values(group: Group, values: list[object]) -> list[object]:
    return group.all_gather(values[group.rank])


def test_ranks_exchange_values_of_different_sizes():
    values = [b"", {"long": "x" * 100_000}, [None, 1.5]]
    pool = RankPool(3)
    try:
        assert pool.call(gather_values, values) == [values] * 3
    finally:
        pool.close()


def gather_beside_a_rank_that_ends(group: Group) -> str:
    if group.rank == 1:
        group.close()
        return ""
    try:
        group.all_gather("")
    except PeerLost as error:
        return str(error)
    return "nothing"


def test_a_rank_that_ended_is_one_line_and_no_error_of_torch():
    pool = RankPool(2)
    try:
        told, _ = pool.call(gather_beside_a_rank_that_ends)
    finally:
        pool.close()
    assert re.fullmatch(r"rank 0: the other ranks do not answer \(.+\); one has ended or is late", told)


def gather_garbage(group: Group, garbage: bytes) -> str:
    if group.rank == 1:
        messages.encode = lambda _: garbage
    try:
        return str(group.all_gather(""))
    except PeerLost as error:
        return str(error)


@pytest.mark.parametrize("garbage", [b"\xff", b"{", b'{"$array": ""}', b'{"$bytes": 1}', b"[" * 100_000])
def test_a_message_that_no_rank_sends_is_one_line(garbage: bytes):
    pool = RankPool(2)
    try:
        told = pool.call(gather_garbage, garbage)
    finally:
        pool.close()
    for rank, text in enumerate(told):
        assert re.fullmatch(rf"rank {rank}: the other ranks do not answer \(.+\); one has ended or is late", text)


@pytest.mark.parametrize("error", [ValueError("basic_string::_M_create"), MemoryError(), RuntimeError("a\nb")])
def test_whatever_torch_raises_is_one_line(error: Exception):
    with pytest.raises(PeerLost) as caught, losing_peers(3):
        raise error
    why = str(error).partition("\n")[0] or "MemoryError"
    assert str(caught.value) == f"rank 3: the other ranks do not answer ({why}); one has ended or is late"
