"""Prepared weights of int4 experts: where each bit goes and comes back from, and what calls take and refuse."""

from __future__ import annotations

import functools
import warnings
from types import SimpleNamespace

import pytest
import torch
from int4_experts import draw_rows, draw_words, offsets_of

from tracekern.errors import BadInput
from tracekern.moe.gemm import PreparedWeights, fused_moe_apply, k4, prepare_weights, prepared, restore_weights
from tracekern.moe.gemm.blocks import permuted
from tracekern.moe.gemm.experts import Int4Experts
from tracekern.moe.gemm.kernels import (
    FACTS,
    PREPARED_STAGINGS,
    SPLIT_STAGINGS,
    STAGINGS,
    layer_stages,
    product_stages,
    tile_tensors,
)
from tracekern.moe.gemm.prepared import stagings_of

CPU = torch.device("cpu")

# ---- where each bit goes ----


def lane_of(words: torch.Tensor, expert: int, tall: int, wide: int, lane: int) -> list[int]:
    """The four words of a lane of a block, field by field in whole numbers. words: as packed."""
    g, t = lane // 4, lane % 4

    def word(half: int, row: int) -> int:
        return int(words[expert, 2 * tall + half // 2, 16 * wide + row, half % 2]) & ((1 << 64) - 1)

    def q4(half: int, row: int, chunk: int) -> int:
        return word(half, row) >> 4 * chunk & 15

    def idx2(half: int, row: int, chunk: int) -> int:
        return word(half, row) >> (32 + 2 * chunk) & 3

    def scale(half: int, row: int) -> int:
        return word(half, row) >> 48

    numbers = [
        sum(q4(2 * f + i, g + 8 * (j % 2), t + 4 * (j // 2)) << 16 * i + 4 * j for i in range(2) for j in range(4))
        for f in range(2)
    ]
    places = sum(
        idx2(2 * (t // 2) + i, g + 8 * (n // 4), 4 * (t % 2) + n % 4) << 4 * n + 2 * i
        for n in range(8)
        for i in range(2)
    )
    scales = sum(scale(2 * (t % 2) + i, g + 8 * (t // 2)) << 16 * i for i in range(2))
    return [*numbers, places, scales]


@pytest.mark.parametrize(("expert", "tall", "wide"), [(0, 0, 0), (1, 2, 7), (1, 1, 3)])
def test_a_block_has_each_field_where_its_lane_wants_it(expert, tall, wide):
    words = draw_words(2, 384, 128)
    blocks = prepare_weights(words).words
    assert tuple(blocks.shape) == (2, 3, 8, 64)
    lanes = blocks[expert, tall, wide].view(torch.int32).view(32, 4).long() & 0xFFFFFFFF
    assert lanes.tolist() == [lane_of(words, expert, tall, wide, lane) for lane in range(32)]


@pytest.mark.parametrize(("experts", "channels", "rows"), [(1, 128, 128), (3, 384, 256), (2, 256, 640), (40, 128, 128)])
@pytest.mark.parametrize("staging", stagings_of(CPU))
def test_restored_words_are_those_that_were_prepared(staging, experts, channels, rows):
    words = draw_words(experts, channels, rows, seed=experts)
    weights = prepare_weights(words, staging)
    assert (weights.num_experts, weights.channels, weights.rows) == (experts, channels, rows)
    assert (weights.staging, weights.device) == (staging, CPU)
    assert weights.words.numel() == words.numel()
    assert torch.equal(restore_weights(weights), words)


def test_any_bits_come_back():
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (2, 4, 128, 2), generator=generator)
    assert torch.equal(restore_weights(PreparedWeights(permuted(words), "reg")), words)


def test_each_bit_has_a_place_of_its_own():
    # Block i of one expert has bit i alone.
    num_bits = 16 * 4 * 64
    bit = torch.arange(num_bits)
    words = torch.zeros((1, 2, 16 * num_bits, 2), dtype=torch.int64)
    group, row, half = bit // 2048, bit // 128 % 16, bit // 64 % 2
    words[0, group, 16 * bit + row, half] = torch.ones((), dtype=torch.int64) << bit % 64
    blocks = permuted(words)[0, 0].view(torch.uint8)
    set_bits = (blocks[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)
    assert bool((set_bits.sum(1) == 1).all())
    assert sorted(set_bits.argmax(1).tolist()) == bit.tolist()


def test_slices_are_experts_in_the_same_memory():
    words = draw_words(5, 128, 256)
    weights = prepare_weights(words)
    some = weights[1:3]
    assert torch.equal(restore_weights(some), words[1:3])
    assert some.words.data_ptr() == weights.words[1].data_ptr()
    assert some.staging == weights.staging


# ---- what a device runs ----


def test_stagings_are_those_of_the_kernels():
    assert [*STAGINGS, *PREPARED_STAGINGS] == list(FACTS.stagings)
    assert {name for staging in FACTS.stagings for name in layer_stages(staging, 1 << 20)} <= set(FACTS.stages)


@pytest.mark.parametrize(
    ("capability", "stagings"),
    [
        ((8, 0), ("reg",)),
        ((8, 9), ("reg",)),
        ((9, 0), ("wide", "ring", "reg")),
        ((10, 0), ("ring", "reg")),
        ((12, 0), ("ring", "reg")),
    ],
)
def test_a_gpu_has_the_stagings_of_its_capability(monkeypatch, capability, stagings):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert stagings_of(torch.device("cuda:0")) == stagings
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert stagings_of(torch.device("cuda:0")) == ()


@pytest.mark.parametrize(("suitable", "told"), [(("ring", "reg"), "ring, reg"), ((), "packed words alone")])
def test_a_staging_of_other_devices_is_refused(monkeypatch, suitable, told):
    words = small().w2
    monkeypatch.setattr(prepared, "stagings_of", lambda device: suitable)
    with pytest.raises(BadInput, match=f"^staging is 'wide'; cpu takes {told}$"):
        prepare_weights(words, "wide")


def test_a_device_that_takes_packed_words_alone_gets_them_as_they_are(monkeypatch):
    words = small().w2
    monkeypatch.setattr(prepared, "stagings_of", lambda device: ())
    weights = prepare_weights(words)
    assert weights.words is words
    assert weights.staging == "direct"


def test_a_gpu_that_computes_otherwise_is_warned_of(monkeypatch):
    def fake(rows: torch.Tensor, off_e: torch.Tensor, weights: torch.Tensor | PreparedWeights) -> torch.Tensor:
        return torch.full((len(rows), 4), float(isinstance(weights, PreparedWeights))).bfloat16()

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(prepared, "k2", lambda rows, *_: rows)
    monkeypatch.setattr(prepared, "k4", lambda rows, *_: rows)
    check = prepared._takes_unordered.__wrapped__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check(CPU, "ring")
    monkeypatch.setattr(prepared, "k4", fake)
    with pytest.warns(UserWarning, match="^Some GPU: kernels with staging ring and direct differ") as told:
        assert not check(CPU, "ring")
    assert [str(one.message).count("\n") for one in told] == [0]


@pytest.mark.parametrize("staging", [*STAGINGS, *PREPARED_STAGINGS])
def test_a_product_is_two_launches_where_experts_may_have_many_rows(staging):
    few = FACTS.few_tokens
    for most_rows in (0, 1, few):
        assert product_stages("k2", staging, most_rows) == ("k2",)
        assert layer_stages(staging, most_rows) == ("layout", "permute", "k2", "k4", "unpermute")
    is_split = staging in SPLIT_STAGINGS
    assert product_stages("k4", staging, few + 1) == (("k4_many", "k4") if is_split else ("k4",))
    products = ("k2_many", "k2", "k4_many", "k4") if is_split else ("k2", "k4")
    assert layer_stages(staging, few + 1) == ("layout", "permute", *products, "unpermute")


def test_tiles_have_room_for_what_experts_may_have():
    x = draw_rows(1, 128)
    assert {name: tuple(one.shape) for name, one in tile_tensors("reg", 5, 100, x).items()} == {"tile_end": (6,)}
    listed = tile_tensors("wide", 5, 100, x)
    assert {name: tuple(one.shape) for name, one in listed.items()} == {"tile_list": (18, 4), "tile_count": (4,)}
    assert {one.dtype for one in listed.values()} == {torch.int32}


# ---- calls ----


@functools.cache
def small() -> SimpleNamespace:
    w13, w2 = draw_words(4, 128, 256, seed=3), draw_words(4, 128, 128, seed=4)
    ids = torch.tensor([[0, 1], [2, 3], [1, 3]], dtype=torch.int32)
    ready = {staging: (prepare_weights(w13, staging), prepare_weights(w2, staging)) for staging in stagings_of(CPU)}
    return SimpleNamespace(x=draw_rows(3, 128), ids=ids, ws=torch.rand(3, 2), w13=w13, w2=w2, **ready)


def apply(w13: object, w2: object, **options: object) -> torch.Tensor:
    return fused_moe_apply(small().x, small().ids, small().ws, w13, w2, **options)


def with_scale(scale: float) -> torch.Tensor:
    words = small().w2.clone()
    words[1, 0, 5, 1] = int(torch.tensor(scale).bfloat16().view(torch.int16)) << 48
    return words


REFUSED = {
    "staging of words": (
        lambda: prepare_weights(small().w2, "direct"),
        "staging is 'direct'; weights are prepared for",
    ),
    "dtype": (lambda: prepare_weights(small().w2.int()), "words is torch.int32"),
    "prepared twice": (lambda: prepare_weights(small().ring[1].words), r"words is torch.int64 \[4, 1, 8, 64\]"),
    "layout": (lambda: prepare_weights(small().w2.transpose(1, 2)), "words is not contiguous"),
    "channels": (lambda: prepare_weights(draw_words(1, 192, 128)), "channels is 192; wanted a multiple of 128"),
    "rows": (lambda: prepare_weights(draw_words(1, 128, 64)), "rows is 64; wanted a multiple of 128"),
    "NaN": (lambda: prepare_weights(with_scale(float("nan"))), r"words\[1, 0, 5, 1\] has a scale that is NaN"),
    "device": (lambda: prepare_weights(small().w2.to("meta")), "tensors are on meta; wanted cpu or cuda"),
    "packed words": (
        lambda: apply(small().w13, small().w2, staging="ring"),
        r"staging is 'ring', w13 are packed words; make them ready with prepare_weights\(\)",
    ),
    "another staging": (
        lambda: apply(*small().ring, staging="reg"),
        "w13 has staging 'ring', wanted reg; prepare_weights",
    ),
    "direct of prepared": (
        lambda: k4(small().x, offsets_of([3, 0, 0, 0]), small().ring[1], staging="direct"),
        "w2 has staging 'ring', wanted direct; prepare_weights",
    ),
    "two stagings": (
        lambda: apply(small().ring[0], small().reg[1]),
        "w13 has staging 'ring', w2 'reg'; prepare_weights.. both alike",
    ),
    "one prepared": (lambda: apply(small().w13, small().ring[1]), "w13 has staging 'direct', w2 'ring'"),
    "another size": (
        lambda: apply(small().ring[0], prepare_weights(draw_words(4, 256, 128))),
        r"w2 is torch.int64 \[4, 2, 8, 64\]; wanted torch.int64 \[4, 1, 8, 64\]",
    ),
    "words for blocks": (
        lambda: apply(PreparedWeights(small().w13, "ring"), small().ring[1]),
        r"w13 is torch.int64 \[4, 2, 256, 2\]; wanted torch.int64 \[4, 1, 256, 64\]",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_is_refused_in_one_line(what):
    call, told = REFUSED[what]
    with pytest.raises(BadInput, match=told) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("staging", [None, *stagings_of(CPU)])
def test_experts_of_ranks_take_prepared_weights(staging):
    plain = Int4Experts.of(small().w13, small().w2)
    ready = Int4Experts.of(prepare_weights(small().w13, staging), prepare_weights(small().w2, staging)).to("cpu")
    assert ready.intermediate == plain.intermediate == 128
    assert torch.equal(ready.scale, plain.scale)
    expert = small().ids[:, 0].long()
    assert torch.equal(ready.apply(small().x, expert), plain.apply(small().x, expert))
