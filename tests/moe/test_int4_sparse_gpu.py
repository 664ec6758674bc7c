"""int4 experts on a GPU: the instruction itself against fp64, and the same promises as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from int4_experts import draw_rows, draw_words, offsets_of

import tracekern
from tracekern.errors import BadInput
from tracekern.moe.gemm import fused_moe_apply, k2, k4, permute, unpack, unpermute
from tracekern.moe.gemm.kernels import STAGINGS
from tracekern.moe.gemm.reference import k2_reference, k4_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

KERNELS = {"k2": (k2, k2_reference), "k4": (k4, k4_reference)}


def words_of(stage: str, experts: int, channels: int, outputs: int, scale: str = "plain") -> torch.Tensor:
    return draw_words(experts, channels, 2 * outputs if stage == "k2" else outputs, scale=scale).cuda()


@pytest.mark.parametrize("scale", ["plain", "negative", "zero", "subnormal"])
def test_every_number_lands_where_its_place_says(scale):
    words = words_of("k4", 1, 128, 128, scale)
    result = k4(torch.eye(128).bfloat16().cuda(), offsets_of([128]).cuda(), words)
    assert torch.equal(result, unpack(words)[0].T.bfloat16())


@pytest.mark.parametrize("stage", KERNELS)
@pytest.mark.parametrize(
    ("counts", "channels", "outputs"),
    [
        ([7, 0, 1, 8, 9, 300], 512, 384),
        ([3] * 256, 256, 256),
        ([9, 1], 7168, 2048),
        ([9, 1], 2048, 7168),
    ],
)
def test_kernels_agree_with_fp64(stage, counts, channels, outputs):
    kernel, reference = KERNELS[stage]
    rows, off_e = draw_rows(sum(counts), channels).cuda(), offsets_of(counts).cuda()
    words = words_of(stage, len(counts), channels, outputs)
    results = [kernel(rows, off_e, words, staging=staging) for staging in STAGINGS]
    assert torch.equal(results[0].view(torch.int16), results[1].view(torch.int16)), "staging changes bits"
    wanted = reference(rows, off_e, words)
    off = (results[0].double() - wanted.value).abs()
    assert bool((off <= wanted.bound).all()), f"{float((off / wanted.bound).max())} of the bound"


@pytest.mark.parametrize("stage", KERNELS)
def test_a_row_does_not_depend_on_its_tile_mates(stage):
    kernel, _ = KERNELS[stage]
    rows, words = draw_rows(11, 512).cuda(), words_of(stage, 2, 512, 256)
    together = kernel(rows, offsets_of([3, 8]).cuda(), words)
    for row in range(11):
        alone = kernel(rows[row : row + 1].clone(), offsets_of([1, 0] if row < 3 else [0, 1]).cuda(), words)
        assert torch.equal(alone[0].view(torch.int16), together[row].view(torch.int16)), row


@pytest.mark.parametrize(("tokens", "topk", "experts"), [(0, 2, 8), (1, 8, 128), (300, 8, 128), (64, 8, 256)])
def test_a_call_is_its_five_steps(tokens, topk, experts):
    hidden, intermediate = 512, 256
    x = draw_rows(tokens, hidden).cuda()
    ids = torch.rand((tokens, experts)).argsort(dim=1)[:, :topk].int().contiguous().cuda()
    weights = torch.rand((tokens, topk)).cuda()
    w13 = words_of("k2", experts, hidden, intermediate)
    w2 = words_of("k4", experts, intermediate, hidden)
    x_perm, off_e, inv = permute(x, ids, experts)
    y_perm = k4(k2(x_perm, off_e, w13), off_e, w2)
    assert torch.equal(x_perm[inv.long()], x[:, None].expand(-1, topk, -1))
    assert torch.equal(fused_moe_apply(x, ids, weights, w13, w2), unpermute(y_perm, inv, weights))


@pytest.mark.parametrize(("dtype", "beyond"), [(torch.int32, 1 << 30), (torch.int64, 1 << 32)])
def test_a_choice_out_of_range_has_no_row(dtype, beyond):
    x, words = draw_rows(3, 128).cuda(), words_of("k4", 4, 128, 128)
    ids = torch.tensor([[0, 4], [-1, -7], [3, beyond]], dtype=dtype).cuda()
    x_perm, off_e, inv = permute(x, ids, 4, eids=torch.tensor([3, 0, 9], dtype=torch.int32).cuda())
    assert off_e.tolist() == [0, 1, 1, 1, 2]
    assert inv.tolist() == [[0, -1], [-1, -1], [1, -1]]
    assert bool(k4(x_perm, off_e, words)[:2].isfinite().all())


def test_tensors_of_two_devices_are_refused():
    with pytest.raises(BadInput, match="other tensors on cuda:0"):
        k4(draw_rows(1, 128).cuda(), offsets_of([1]).cuda(), draw_words(1, 128, 128))


def test_a_call_is_on_record_tile_by_tile(tmp_path: Path):
    rows, off_e, words = draw_rows(20, 256).cuda(), offsets_of([9, 0, 11]).cuda(), words_of("k2", 3, 256, 256)
    untraced = k2(rows, off_e, words)
    with tracekern.capture(tmp_path, device="cuda") as capture:
        traced = k2(rows, off_e, words, capture=capture)
        torch.cuda.synchronize()
    assert torch.equal(traced, untraced)
    timeline = tracekern.load(tmp_path)
    tiles = 4 * 2
    spans = {name: len(timeline.rows_of(name)) for name in ("preload", "sweep", "epilogue")}
    assert spans == {"preload": 4 * tiles, "sweep": 8 * tiles, "epilogue": 8 * tiles}


# ---- steps ----

STEPS = ("stage", "park", "load_b", "decode", "multiply")


@pytest.mark.parametrize("clock", ["realtime", "cycles"])
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("stage", KERNELS)
def test_every_nth_tile_has_its_steps_and_results_are_the_same_bits(tmp_path: Path, stage, staging, clock):
    kernel, _ = KERNELS[stage]
    channels, outputs, paths = 1024, 512, 2 if stage == "k2" else 1
    counts = [9, 0, 64, 3]
    rows, off_e = draw_rows(sum(counts), channels).cuda(), offsets_of(counts).cuda()
    words = words_of(stage, len(counts), channels, outputs)
    untraced = kernel(rows, off_e, words, staging=staging)
    with tracekern.capture(tmp_path, device="cuda", clock=clock, records_per_track=16_384) as capture:
        traced = kernel(rows, off_e, words, staging=staging, detail=3, capture=capture)
        torch.cuda.synchronize()
    assert torch.equal(traced.view(torch.int16), untraced.view(torch.int16))
    timeline = tracekern.load(tmp_path)
    assert {problem.kind for problem in timeline.problems} <= {"cycle_clock", "dense_probes", "held_up_launch"}
    tiles, groups = sum(-(-count // 8) for count in counts) * outputs // 128, channels // 64
    sweeps = -(-tiles // 3) * 4 * 2
    parks = 2 if staging == "pinned" else 1
    found = {name: len(timeline.rows_of(name)) for name in STEPS}
    wanted = dict(zip(STEPS, (1, parks, 2, 2 * paths, 2 * paths), strict=True))
    assert found == {name: sweeps * groups * count for name, count in wanted.items()}


def test_steps_in_cycles_are_as_short_as_their_instructions(tmp_path: Path):
    """A step is some tens of ns, and on the realtime clock 0 or 32."""
    rows, off_e, words = draw_rows(8, 1024).cuda(), offsets_of([8]).cuda(), words_of("k2", 1, 1024, 128)
    with tracekern.capture(tmp_path, device="cuda", clock="cycles", records_per_track=16_384) as capture:
        for _ in range(3):  # the first one loads its code
            k2(rows, off_e, words, detail=1, capture=capture)
        torch.cuda.synchronize()
    timeline = tracekern.load(tmp_path)
    spans = timeline.spans
    for name in ("load_b", "multiply"):
        lengths = (spans.end - spans.start)[timeline.rows_of(name)]
        assert lengths.min() > 0, name
        assert bool((lengths % 32 != 0).any()), name


@pytest.mark.parametrize("is_detailed", [False, True])
@pytest.mark.parametrize("record_format", ["", "span", "ring", "cycles"])
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("stage", ["k2", "k4"])
def test_no_body_spills(stage, staging, record_format, is_detailed):
    from tracekern import _cuda

    registers, local_bytes = _cuda.families["gemm"].resources(stage, staging, record_format, is_detailed)
    assert 0 < registers <= 255
    assert local_bytes == 0


@pytest.mark.parametrize("clock", ["realtime", "cycles"])
def test_a_run_of_ranks_records_steps(command_line, tmp_path: Path, clock):
    size = ("--ranks", 2, "--tokens", 8, "--hidden", 512, "--intermediate", 256, "--experts", 8, "--topk", 2)
    kind = ("--variant", "fused", "--expert", "int4_sparse", "--backend", "cuda", "--iterations", 2)
    recorded = ("--detail", 4, "--clock", clock, "-o", tmp_path / "capture")
    done = command_line("run", "moe", *size, *kind, *recorded)
    assert done.returncode == 0, done.stderr
    timeline = tracekern.load(tmp_path / "capture")
    assert len(timeline.rows_of("multiply_stage"))
    assert {problem.kind for problem in timeline.problems} <= {"cycle_clock", "dense_probes", "held_up_launch"}
