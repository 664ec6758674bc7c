"""K2 and K4 of all stagings: the bits of `direct`, and that they depend on nothing they should not."""

from __future__ import annotations

from pathlib import Path

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
    offsets_of,
)
from low_latency_check import same_bits

import tracekern
from tracekern.moe.gemm import PreparedWeights, fused_moe_apply, k2, k4, permute, prepare_weights, unpack, unpermute
from tracekern.moe.gemm.kernels import (
    FACTS,
    PREPARED_STAGINGS,
    STAGINGS,
    Sizes,
    Tensors,
    launch,
    layer_stages,
    product_stages,
    tile_tensors,
)
from tracekern.moe.gemm.prepared import stagings_of
from tracekern.moe.gemm.reference import k2_reference, k4_reference

KERNELS = {"k2": (k2, k2_reference), "k4": (k4, k4_reference)}
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ON_CPU = (*STAGINGS, *stagings_of(torch.device("cpu")))
PLACES = [
    *(pytest.param(("cpu", staging), id=f"cpu-{staging}") for staging in ON_CPU),
    *(pytest.param(("cuda", staging), id=f"cuda-{staging}", marks=GPU) for staging in PREPARED_STAGINGS),
]
COUNTS = {
    "few and many rows": [0, 1, 7, 8, 9, 16, 17, 64, 65, 81],
    "no rows": [0, 0, 0],
    "one expert of many": [0, 0, 300],
    "the first of many": [300, 0, 3],
    "few rows alone": [16, 2, 1],
    "few rows in all": [9, 0, 7],
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The device, and the staging of its weights."""
    device, staging = request.param
    if device == "cuda" and staging not in stagings_of(torch.device(device)):
        pytest.skip(f"staging {staging} is not for this GPU")
    return device, staging


def words_of(stage: str, experts: int, channels: int, outputs: int, scale: str = "plain") -> torch.Tensor:
    return draw_words(experts, channels, 2 * outputs if stage == "k2" else outputs, scale=scale)


def ready(words: torch.Tensor, place: tuple[str, str]) -> PreparedWeights:
    """As the staging of the place wants them: on a GPU prepare_weights() might have fallen back, with a warning."""
    if place[1] in STAGINGS:
        return PreparedWeights(words, place[1])
    weights = prepare_weights(words.to(place[0]), place[1])
    assert weights.staging == place[1]
    return weights


def check_bits(stage: str, counts: list[int], channels: int, outputs: int, place: tuple[str, str]) -> None:
    assert 2 * instructions(stage, counts, channels, outputs) <= MAX_INSTRUCTIONS
    kernel, device = KERNELS[stage][0], place[0]
    rows, off_e = draw_rows(sum(counts), channels).to(device), offsets_of(counts).to(device)
    words = words_of(stage, len(counts), channels, outputs).to(device)
    assert same_bits(kernel(rows, off_e, ready(words, place)), kernel(rows, off_e, words))


# ---- the bits of direct ----


@pytest.mark.parametrize("stage", KERNELS)
@pytest.mark.parametrize("counts", COUNTS)
def test_any_number_of_tokens(stage, counts, place):
    check_bits(stage, COUNTS[counts], 128, 128, place)


@pytest.mark.parametrize("stage", KERNELS)
@pytest.mark.parametrize(("channels", "outputs"), [(256, 384), (384, 128), (640, 256)])
def test_any_size(stage, channels, outputs, place):
    check_bits(stage, [3, 17, 9], channels, outputs, place)


@pytest.mark.parametrize("stage", KERNELS)
def test_many_experts(stage, place):
    counts = [[0, 1, 0, 9, 0, 0, 18][expert % 7] for expert in range(128)]
    check_bits(stage, counts, 128, 128, place)


@pytest.mark.parametrize("stage", KERNELS)
@pytest.mark.parametrize("scale", SCALES)
def test_kernels_agree_with_fp64(stage, scale, place):
    kernel, reference = KERNELS[stage]
    counts = [7, 0, 1, 18]
    rows, off_e = draw_rows(sum(counts), HIDDEN), offsets_of(counts)
    words = words_of(stage, 4, HIDDEN, 128, scale)
    result = kernel(rows.to(place[0]), off_e.to(place[0]), ready(words, place)).cpu()
    wanted = reference(rows, off_e, words)
    off = (result.double() - wanted.value).abs()
    assert bool((off <= wanted.bound).all()), f"{float((off / wanted.bound).max())} of the bound"


@pytest.mark.parametrize("count", [8, 16, 128])
def test_every_number_lands_where_its_place_says(count, place):
    # Rows that are 1 in one channel: a result is one weight, with nothing to round but the weight.
    words = torch.cat([words_of("k4", 1, 128, 128, scale)[:, :, :32] for scale in SCALES], dim=2).contiguous()
    weights, rows, off_e = ready(words, place), torch.eye(128).bfloat16().to(place[0]), offsets_of([count])
    results = [k4(part.contiguous(), off_e.to(place[0]), weights).cpu() for part in rows.split(count)]
    assert torch.equal(torch.cat(results), unpack(words)[0].T.bfloat16())


# ---- what results do not depend on ----


@pytest.mark.parametrize("stage", KERNELS)
def test_a_row_does_not_depend_on_its_tile_mates(stage, place):
    kernel, device = KERNELS[stage][0], place[0]
    counts = [3, 9, 21]
    rows, weights = draw_rows(33, 128).to(device), ready(words_of(stage, 3, 128, 128), place)
    together = kernel(rows, offsets_of(counts).to(device), weights)
    expert_of = [expert for expert, count in enumerate(counts) for _ in range(count)]
    for row in (0, 2, 3, 10, 11, 12, 19, 20, 28, 32):
        alone = offsets_of([int(expert == expert_of[row]) for expert in range(3)]).to(device)
        assert same_bits(kernel(rows[row : row + 1].clone(), alone, weights)[0], together[row]), row


@pytest.mark.parametrize("stage", KERNELS)
def test_rows_of_others_and_rows_behind_the_last_are_not_read(stage, place):
    kernel, device = KERNELS[stage][0], place[0]
    rows, off_e = draw_rows(60, 128).to(device), offsets_of([3, 5, 17, 2]).to(device)
    weights = ready(words_of(stage, 4, 128, 128), place)
    clean = kernel(rows, off_e, weights)
    for first, last in ((3, 8), (8, 25)):
        spoilt = rows.clone()
        spoilt[first:last] = float("nan")
        spoilt[27:] = float("nan")
        dirty = kernel(spoilt, off_e, weights)
        assert bool(dirty[first:last].isnan().all())
        assert same_bits(dirty[:first], clean[:first])
        assert same_bits(dirty[last:27], clean[last:27])


def run_alone(stage: str, rows: torch.Tensor, weights: PreparedWeights, sizes: Sizes, given: Tensors) -> torch.Tensor:
    """Launches a kernel as pipelines do, on results that are 3."""
    out = torch.full((len(rows), sizes.intermediate), 3.0).bfloat16().to(rows.device)
    tensors: Tensors = {"w13": weights.words, "w2": weights.words, "x_rows": rows, "middle_rows": rows}
    tensors |= {"middle_rows" if stage == "k2" else "result_rows": out}
    tensors |= tile_tensors(weights.staging, sizes.num_listed, sizes.num_rows, rows) | given
    stages = ("tiles", *product_stages(stage, weights.staging, sizes.rows_per_expert or sizes.num_rows))
    launch(stages, sizes, tensors, device=rows.device, staging=weights.staging)
    return out


def sizes_of(num_experts: int, num_rows: int, num_listed: int | None = None, rows_per_expert: int = 0) -> Sizes:
    return Sizes(
        num_experts=num_experts,
        num_listed=num_experts if num_listed is None else num_listed,
        hidden=128,
        intermediate=128,
        rows_per_expert=rows_per_expert,
        num_rows=num_rows,
    )


@pytest.mark.parametrize("stage", KERNELS)
def test_listed_experts_alone_are_computed(stage, place):
    device, counts = place[0], [2, 4, 18, 1, 20]
    rows, off_e = draw_rows(45, 128).to(device), offsets_of(counts).to(device)
    weights = ready(words_of(stage, 5, 128, 128), place)
    whole = KERNELS[stage][0](rows, off_e, weights)
    eids = torch.tensor([4, 3, 1], dtype=torch.int32, device=device)
    out = run_alone(stage, rows, weights, sizes_of(5, 45, 3), {"expert_ids": eids, "expert_offset": off_e})
    listed = torch.tensor([expert in (1, 3, 4) for expert, count in enumerate(counts) for _ in range(count)])
    assert same_bits(out[listed], whole[listed])
    assert bool((out[~listed] == 3.0).all())


@pytest.mark.parametrize("stage", KERNELS)
@pytest.mark.parametrize("per_expert", [16, 20])
def test_rows_may_stand_in_regions(stage, place, per_expert):
    device, counts = place[0], [0, 3, 16, min(per_expert, 17), 1]
    num_rows = 5 * per_expert
    rows, weights = draw_rows(num_rows, 128).to(device), ready(words_of(stage, 5, 128, 128), place)
    is_used = torch.cat([torch.arange(per_expert) < count for count in counts]).to(device)
    rows[~is_used] = float("nan")
    packed = KERNELS[stage][0](rows[is_used], offsets_of(counts).to(device), weights)
    given = {
        "row_counts": torch.tensor(counts, dtype=torch.int32, device=device),
        "expert_offset": torch.empty((5, 2), dtype=torch.int32, device=device),
    }
    out = run_alone(stage, rows, weights, sizes_of(5, num_rows, rows_per_expert=per_expert), given)
    assert same_bits(out[is_used], packed)
    assert bool((out[~is_used] == 3.0).all())


@pytest.mark.parametrize("stage", KERNELS)
@pytest.mark.parametrize("abort", [0, 1])
def test_kernels_return_at_once_after_an_abort(stage, place, abort):
    device = place[0]
    rows, weights = draw_rows(30, 128).to(device), ready(words_of(stage, 2, 128, 128), place)
    given = {
        "expert_offset": offsets_of([9, 21]).to(device),
        "abort": torch.tensor([abort], dtype=torch.int32, device=device),
    }
    out = run_alone(stage, rows, weights, sizes_of(2, 30), given)
    assert bool((out == 3.0).all()) == bool(abort)


# ---- the layer ----


@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "only_expert"),
    [(0, 2, 8, None), (1, 2, 8, None), (8, 2, 8, None), (9, 3, 8, None), (24, 2, 128, None), (70, 1, 8, 5)],
)
def test_a_layer_has_the_bits_of_direct(place, tokens, topk, experts, only_expert):
    device = place[0]
    layer = draw_layer(tokens, topk, experts, size=128, only_expert=only_expert)
    given = (layer.x.to(device), layer.topk_ids.to(device), layer.topk_ws.to(device))
    packed = layer.w13.to(device), layer.w2.to(device)
    weights = [ready(words, place) for words in packed]
    out = fused_moe_apply(*given, *weights)
    assert same_bits(out, fused_moe_apply(*given, *packed))
    assert same_bits(out, fused_moe_apply(*given, *weights, staging=place[1]))
    eids = torch.tensor([6, 1, 5], dtype=torch.int32, device=device)
    assert same_bits(fused_moe_apply(*given, *weights, eids=eids), fused_moe_apply(*given, *packed, eids=eids))
    x_perm, off_e, inv = permute(given[0], given[1], experts)
    y_perm = k4(k2(x_perm, off_e, weights[0]), off_e, weights[1])
    assert same_bits(out, unpermute(y_perm, inv, given[2]))


@pytest.mark.parametrize("tokens", [8, 9])
def test_a_call_is_on_record_launch_by_launch(place, tokens, tmp_path: Path):
    device, staging = place
    layer = draw_layer(tokens, 2, 4, size=128, only_expert=1)
    given = [one.to(device) for one in (layer.x, layer.topk_ids, layer.topk_ws)]
    weights = [ready(words, place) for words in (layer.w13, layer.w2)]
    with tracekern.capture(tmp_path, device=device) as capture:
        out = fused_moe_apply(*given, *weights, capture=capture)
    assert same_bits(out, fused_moe_apply(*given, *weights))
    assert FACTS.few_tokens == 2 * 8
    names = [launch.name for launch in tracekern.load(tmp_path).launches]
    assert names == list(layer_stages(staging, 2 * tokens))
