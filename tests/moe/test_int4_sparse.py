"""int4 2:4-sparse experts: the packing, both kernels against fp64, and that bits depend on nothing they should not."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from int4_experts import (
    HIDDEN,
    MAX_INSTRUCTIONS,
    SCALES,
    draw_layer,
    draw_rows,
    draw_words,
    instructions,
    num_tiles,
    offsets_of,
)

import tracekern
from tests.paths import ROOT
from tracekern.errors import BadInput
from tracekern.moe.gemm import fused_moe_apply, k2, k4, pack_w2, pack_w13, permute, router, unpack, unpermute
from tracekern.moe.gemm.checks import MAX_SHARED_BYTES, check_device
from tracekern.moe.gemm.kernels import FACTS, STAGINGS, Sizes, launch, layer_stages
from tracekern.moe.gemm.reference import k2_reference, k4_reference
from tracekern.moe.reference import weighted_sum
from tracekern.moe.routing import Batch
from tracekern.timeline.model import Timeline

STAGES = layer_stages("direct", 0)
KERNELS = {"k2": (k2, k2_reference), "k4": (k4, k4_reference)}


def words_of(stage: str, experts: int, *, size: int = HIDDEN, scale: str = "plain") -> torch.Tensor:
    return draw_words(experts, size, 2 * size if stage == "k2" else size, scale=scale)


def check_against_fp64(stage: str, rows: torch.Tensor, off_e: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Runs K2 or K4 with both ways of staging. Returns the result."""
    kernel, reference = KERNELS[stage]
    channels = rows.shape[1]
    counts = off_e.diff().tolist()
    outputs = words.shape[2] // (2 if stage == "k2" else 1)
    assert 2 * instructions(stage, counts, channels, outputs) <= MAX_INSTRUCTIONS
    results = [kernel(rows, off_e, words, staging=staging) for staging in STAGINGS]
    assert torch.equal(results[0].view(torch.int16), results[1].view(torch.int16)), "staging changes bits"
    wanted = reference(rows, off_e, words)
    off = (results[0].double() - wanted.value).abs()
    assert bool((off <= wanted.bound).all()), f"{float((off / wanted.bound).max())} of the bound"
    return results[0]


# ---- packing ----


def test_every_number_lands_where_its_place_says():
    # Rows that are 1 in one channel: a result is one weight, with nothing to round but the weight.
    words = torch.cat([words_of("k4", 1, size=128, scale=scale)[:, :, :32] for scale in SCALES], dim=2)
    chunk = torch.arange(8)
    assert set(((words[..., None] >> 4 * chunk) & 15).flatten().tolist()) == set(range(16))
    assert set(((words[..., None] >> (32 + 2 * chunk)) & 3).flatten().tolist()) == set(range(4))
    result = check_against_fp64("k4", torch.eye(128).bfloat16(), offsets_of([128]), words)
    assert torch.equal(result, unpack(words)[0].T.bfloat16())


@pytest.mark.parametrize("scale", SCALES)
def test_packing_and_unpacking_is_exact(scale):
    dense = unpack(draw_words(2, 128, 256, scale=scale))
    assert torch.equal(unpack(pack_w2(dense, exact=True)), dense)
    gate, up = dense[:, :128], dense[:, 128:]
    assert torch.equal(unpack(pack_w13(gate.contiguous(), up.contiguous(), exact=True)), dense)


def test_packing_keeps_the_largest_of_four_within_half_a_step():
    dense = torch.randn((1, 128, 128), generator=torch.Generator().manual_seed(5))
    packed = unpack(pack_w2(dense))
    chunks, kept = dense.reshape(-1, 4), packed.reshape(-1, 4)
    largest = chunks.abs().argmax(dim=1, keepdim=True)
    assert int((kept != 0).sum(1).max()) == 1
    assert bool((kept.scatter(1, largest, 0.0) == 0).all())
    step = chunks.gather(1, largest).reshape(-1, 8).abs().amax(1, keepdim=True) / 7
    off = (chunks.gather(1, largest) - kept.gather(1, largest)).reshape(-1, 8).abs()
    assert bool((off <= step * (0.5 + 8 * 2.0**-8)).all())


# ---- K2 and K4 ----


@pytest.mark.parametrize("stage", KERNELS)
def test_hidden_and_intermediate_sizes_differ(stage):
    rows = draw_rows(5, 384)  # no whole number of the groups that are loaded ahead
    words = draw_words(1, 384, 256, seed=6)
    check_against_fp64(stage, rows, offsets_of([5]), words)


def test_silu_holds_far_from_zero():
    # Gate and up are x itself, in every output.
    values = [0.0, 1e-30, 1e-3, 0.5, 1, 5, 20, 80, 88, 89, 100, 1e4, 1e18]
    rows = torch.zeros((2 * len(values), 128))
    rows[:, 0] = torch.tensor([*values, *(-value for value in values)])
    one = torch.zeros((1, 128, 128))
    one[:, :, 0] = 1.0
    check_against_fp64("k2", rows.bfloat16(), offsets_of([len(rows)]), pack_w13(one, one, exact=True))


@pytest.mark.parametrize("stage", KERNELS)
def test_kernels_look_for_an_abort_after_each_tile(stage):
    # The word is the first two results: a block that has begun a tile by then still ends it.
    num_tiles, num_blocks = 30, 3
    rows, words, off_e = draw_rows(8 * num_tiles, 128), words_of(stage, 1, size=128), offsets_of([8 * num_tiles])
    out = torch.zeros((8 * num_tiles, 128)).bfloat16()
    tensors = {"w13": words, "w2": words, "expert_offset": off_e, "x_rows": rows, "middle_rows": rows, "abort": out}
    tensors |= {"middle_rows" if stage == "k2" else "result_rows": out, "tile_end": off_e.clone()}
    launch(
        ("tiles", stage), Sizes(num_experts=1, num_listed=1, hidden=128, intermediate=128), tensors, device=rows.device
    )
    written = (out.view(num_tiles, -1) != 0).any(1)
    assert bool(written[0])
    assert int(written.sum()) <= 3 * num_blocks


# ---- the layer ----


def test_permute_puts_rows_in_order_of_experts_then_tokens():
    layer = draw_layer(9, 3, 8)
    ids = layer.topk_ids.clone()
    ids[2, 1] = ids[5, :] = -1
    x_perm, off_e, inv = permute(layer.x, ids, 8)
    flat = ids.flatten().long()
    order = torch.argsort(flat, stable=True)[int((flat < 0).sum()) :]
    assert off_e.tolist() == [0, *torch.bincount(flat[flat >= 0], minlength=8).cumsum(0).tolist()]
    assert torch.equal(inv.flatten()[order], torch.arange(len(order), dtype=torch.int32))
    assert bool((inv[ids < 0] == -1).all())
    assert torch.equal(x_perm[: len(order)], layer.x[order // 3])


def test_choices_of_experts_that_are_not_listed_have_no_row():
    layer = draw_layer(9, 3, 8)
    eids = torch.tensor([6, 1, 3], dtype=torch.int32)
    x_perm, off_e, inv = permute(layer.x, layer.topk_ids, 8, eids=eids)
    is_listed = torch.isin(layer.topk_ids, eids)
    assert torch.equal(inv >= 0, is_listed)
    assert int(off_e[-1]) == int(is_listed.sum())
    ids = layer.topk_ids.where(is_listed, torch.tensor(-1, dtype=torch.int32))
    wanted = fused_moe_apply(layer.x, ids, layer.topk_ws, layer.w13, layer.w2)
    got = fused_moe_apply(layer.x, layer.topk_ids, layer.topk_ws, layer.w13, layer.w2, eids=eids)
    assert torch.equal(got, wanted)


def test_unpermute_adds_as_combine_does():
    layer = draw_layer(9, 3, 8)
    _, _, inv = permute(layer.x, layer.topk_ids, 8)
    inv[4, 1] = inv[7, :] = -1
    y = draw_rows(27, HIDDEN, seed=7)
    batch = Batch(layer.x, torch.where(inv < 0, -1, layer.topk_ids), layer.topk_ws)
    wanted = weighted_sum(batch, y[inv.clamp(min=0).long()].float()).bfloat16()
    assert torch.equal(unpermute(y, inv, layer.topk_ws), wanted)


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "size", "only_expert"),
    [
        (0, 2, 8, 256, None),
        (1, 2, 8, 256, None),
        (9, 3, 8, 256, None),
        (16, 8, 128, 128, None),
        (24, 8, 256, 128, None),
        (300, 1, 8, 128, 5),
    ],
)
def test_a_call_is_its_five_steps(staging, tokens, topk, experts, size, only_expert):
    layer = draw_layer(tokens, topk, experts, size=size, only_expert=only_expert)
    x_perm, off_e, inv = permute(layer.x, layer.topk_ids, experts)
    num_rows = int(off_e[-1])
    assert num_rows == tokens * topk
    x2_perm = k2(x_perm, off_e, layer.w13, staging=staging)
    y_perm = k4(x2_perm, off_e, layer.w2, staging=staging)
    for rows, reference in (
        (x2_perm, k2_reference(x_perm, off_e, layer.w13)),
        (y_perm, k4_reference(x2_perm, off_e, layer.w2)),
    ):
        assert bool(((rows.double() - reference.value).abs() <= reference.bound).all())
    out = fused_moe_apply(layer.x, layer.topk_ids, layer.topk_ws, layer.w13, layer.w2, staging=staging)
    assert torch.equal(out, unpermute(y_perm, inv, layer.topk_ws))


def test_the_router_takes_the_largest_of_a_softmax():
    logits = torch.randn((5, 16), generator=torch.Generator().manual_seed(8))
    ids, weights = router(logits, 3)
    ordered = logits.softmax(1).sort(1, descending=True)
    assert torch.equal(ids, ordered.indices[:, :3].int())
    assert torch.equal(weights, ordered.values[:, :3])


# ---- the trace ----


def test_a_call_is_on_record_tile_by_tile(tmp_path: Path):
    layer = draw_layer(9, 2, 4, size=256)
    with tracekern.capture(tmp_path, device="cpu") as capture:
        fused_moe_apply(layer.x, layer.topk_ids, layer.topk_ws, layer.w13, layer.w2, capture=capture)
    timeline = tracekern.load(tmp_path)
    assert [launch.name for launch in timeline.launches] == list(STAGES)
    assert not timeline.problems
    tiles = 2 * num_tiles(torch.bincount(layer.topk_ids.flatten(), minlength=4).tolist())
    names = np.array([event.name for event in timeline.events])[timeline.spans.event]
    stages = np.array([launch.name for launch in timeline.launches])[timeline.spans.launch]
    for stage in ("k2", "k4"):
        counts = {name: int(((names == name) & (stages == stage)).sum()) for name in ("preload", "sweep", "epilogue")}
        assert counts == {"preload": 4 * tiles, "sweep": 8 * tiles, "epilogue": 8 * tiles}
    check_preloads(timeline, layer.topk_ids)
    assert int((names == "permute_token").sum()) == 18
    assert int((names == "rank_choices").sum()) == 4


def check_preloads(timeline: Timeline, topk_ids: torch.Tensor) -> None:
    """Each warp says the first row of a tile and how many of its 8 are there, for both outputs of both kernels."""
    counts = torch.bincount(topk_ids.flatten(), minlength=4).tolist()
    wanted, begin = Counter(), 0
    for expert, count in enumerate(counts):
        for first in range(0, count, 8):
            for output_tile in range(2):
                wanted[expert, begin + first, output_tile, min(8, count - first)] = 8
        begin += count
    rows = timeline.rows_of("preload")
    fields = (timeline.field(rows, name).tolist() for name in ("expert", "first_row", "output_tile", "rows"))
    assert Counter(zip(*fields, strict=True)) == wanted


def test_a_preload_ends_behind_the_last_warp_of_its_block(tmp_path: Path):
    layer = draw_layer(9, 2, 4, size=128)
    with tracekern.capture(tmp_path, device="cpu", events=["preload"]) as capture:
        fused_moe_apply(layer.x, layer.topk_ids, layer.topk_ws, layer.w13, layer.w2, capture=capture)
    timeline = tracekern.load(tmp_path)
    spans = timeline.spans
    blocks = np.array([track.block for track in timeline.tracks])[spans.track]
    preloads = timeline.rows_of("preload")
    tiles = np.stack([spans.launch, blocks, spans.begin_payload.astype(np.int64)], axis=1)[preloads]
    for tile in np.unique(tiles, axis=0):
        same = preloads[(tiles == tile).all(axis=1)]
        assert len(same) == 4
        assert spans.end[same].min() >= spans.start[same].max()


# ---- what is refused ----


@functools.cache
def small_layer():
    return draw_layer(3, 2, 4, size=128)


def refused(**changes: object) -> None:
    layer = small_layer()
    given = {"x": layer.x, "topk_ids": layer.topk_ids, "topk_ws": layer.topk_ws, "w13": layer.w13, "w2": layer.w2}
    fused_moe_apply(**(given | changes))


def with_scale(words: torch.Tensor, scale: float) -> torch.Tensor:
    changed = words.clone()
    changed[1, 0, 5, 1] = int(torch.tensor(scale).bfloat16().view(torch.int16)) << 48
    return changed


REFUSED = {
    "hidden": (lambda: refused(x=draw_rows(3, 192)), "channels of x is 192; wanted a multiple of 128"),
    "intermediate": (lambda: refused(w13=draw_words(4, 128, 320)), "intermediate is 160; wanted a multiple of 128"),
    "shared memory": (lambda: refused(x=draw_rows(3, 14592)), "14592 channels need 234496 bytes of shared memory"),
    "shape of w2": (lambda: refused(w2=draw_words(4, 256, 128)), "w2 is torch.int64"),
    "dtype of x": (lambda: refused(x=torch.ones(3, 128)), "x is torch.float32"),
    "dtype of choices": (
        lambda: refused(topk_ids=small_layer().topk_ids.short()),
        r"topk_ids is torch.int16 \[3, 2\]; wanted torch.int32 or torch.int64 \[3, 2\]",
    ),
    "shape of choices": (
        lambda: refused(topk_ids=small_layer().topk_ids.flatten()),
        r"topk_ids is torch.int32 \[6\]; wanted torch.int32 or torch.int64 \[3, -1\]",
    ),
    "shape of weights": (lambda: refused(topk_ws=torch.ones(3, 3)), r"topk_ws is torch.float32 \[3, 3\]"),
    "device": (lambda: refused(w2=small_layer().w2.to("meta")), "w2 is on meta, other tensors on cpu"),
    "layout": (lambda: refused(x=draw_rows(128, 128).T[:3]), "x is not contiguous"),
    "alignment": (
        lambda: refused(x=draw_rows(4, 128).flatten()[1 : 1 + 3 * 128].view(3, 128)),
        "x begins at an address",
    ),
    "expert": (lambda: refused(topk_ids=small_layer().topk_ids + 3), r"topk_ids\[\d, \d\] is expert \d; wanted -1"),
    "expert of 64 bits": (
        lambda: refused(topk_ids=small_layer().topk_ids.long() + (1 << 32)),
        r"topk_ids\[0, 0\] is expert 429496\d+; wanted -1",
    ),
    "eids": (lambda: refused(eids=torch.tensor([0, 4], dtype=torch.int32)), "eids has .* wanted 0 to 3"),
    "eids twice": (
        lambda: refused(eids=torch.tensor([1, 1], dtype=torch.int32)),
        "eids has .* wanted each expert once",
    ),
    "staging": (lambda: refused(staging="fast"), "staging is 'fast'; wanted one of direct, pinned"),
    "NaN": (lambda: refused(w13=with_scale(small_layer().w13, float("nan"))), r"w13\[1, 0, 5, 1\] has a scale that is"),
    "offsets": (
        lambda: k2(draw_rows(9, 128), offsets_of([5, -2, 2, 1]), small_layer().w13),
        "off_e does not rise from 0 to at most 9 rows",
    ),
    "abort": (
        lambda: k4(draw_rows(4, 128), offsets_of([4, 0, 0, 0]), small_layer().w2, abort=torch.zeros(1)),
        r"abort is torch.float32 \[1\]; wanted torch.int32 \[1\]",
    ),
    "rows of choices": (
        lambda: unpermute(draw_rows(4, 128), torch.full((2, 1), 4, dtype=torch.int32), torch.ones(2, 1)),
        "inv has rows 4 to 4; wanted -1 .none. or 0 to 3",
    ),
    "shape of inv": (
        lambda: unpermute(draw_rows(4, 128), torch.zeros(4, dtype=torch.int32), torch.ones(4)),
        r"inv is torch.int32 \[4\]",
    ),
    "not one of four": (lambda: pack_w2(torch.ones(1, 128, 128), exact=True), "expert 0, row 0, channel 1 does not"),
    "weights": (lambda: pack_w2(torch.full((1, 128, 128), float("inf"))), "weights with NaN or infinity"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_is_refused_in_one_line(what):
    call, told = REFUSED[what]
    with pytest.raises(BadInput, match=told) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_gpu_without_the_instruction_is_refused(monkeypatch):
    old = SimpleNamespace(name="Tesla T4", major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: old)
    with pytest.raises(BadInput, match="^Tesla T4 is sm_75; int4 experts need sm_80 or newer$"):
        check_device(SimpleNamespace(device=torch.device("cuda:0")), 128)


# ---- the page ----

PAGE = (ROOT / "docs" / "int4_sparse.md").read_text()


def test_the_python_of_the_page_runs(tmp_path: Path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
    assert [launch.name for launch in tracekern.load(tmp_path / "int4-capture").launches] == list(STAGES)


def test_the_page_names_the_limit_that_there_is():
    (most,) = re.findall(r"\(([\d,]+) channels on an H100\)", PAGE)
    channels = int(most.replace(",", ""))
    assert FACTS.shared_bytes(channels) <= MAX_SHARED_BYTES < FACTS.shared_bytes(channels + 128)
