"""Every variant and both barriers under the sanitizers: a thread a warp, all ranks in one process."""

from __future__ import annotations

import pytest
from attack import SAMPLED_NUMBERS, TSAN, VARIANTS, Shape, assert_right, run_program, stress
from toolchains import SAMPLE, program

SHAPES = {
    "several_blocks": Shape(iterations=20),
    "one_warp": Shape(ranks=2, blocks=1, warps=1, tokens=5, experts=4, topk=3, iterations=60),
    "no_tokens": Shape(ranks=3, tokens=0, experts=3, topk=1, iterations=30),
    "one_rank": Shape(ranks=1, tokens=9, experts=5, topk=4),
    "odd_row": Shape(ranks=4, blocks=3, warps=1, tokens=6, hidden=13, experts=4, topk=1, iterations=25),
}
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
MEMORY = ("-O0", "-g1", *SANITIZERS, "-DTK_POISON_CONSUMED", *SAMPLE)


def races() -> list[object]:
    """Every variant in every shape; four of seven variants run one shape in `make test` and all in `make soak`."""
    kept = ("flag", "balanced", "pipelined")
    return [
        pytest.param(
            shape,
            variant,
            id=f"{name}-{variant}",
            marks=[] if name == "several_blocks" or variant in kept else [pytest.mark.soak],
        )
        for name, shape in SHAPES.items()
        for variant in VARIANTS
    ]


@pytest.mark.parametrize(("shape", "variant"), races())
def test_variants_have_no_race(shape, variant):
    assert_right(stress(TSAN, variant, "bf16", "threads", shape))


def test_recording_has_no_race():
    shape = Shape(iterations=15)
    assert_right(stress(TSAN, "balanced", "bf16", "threads", shape, "trace=on"))


@pytest.mark.parametrize(
    "arguments", [("grid", "threads", "1", "4", "3", "200"), ("rank", "threads", "3", "1", "1", "300")], ids=str
)
def test_barriers_have_no_race(arguments):
    assert_right(run_program(program("barriers", *TSAN), *arguments))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("number", SAMPLED_NUMBERS)
def test_memory_is_used_as_it_should(variant, number):
    assert_right(stress(MEMORY, variant, number, "fibers", Shape(ranks=4, blocks=3, experts=8, iterations=10)))
    assert_right(stress(MEMORY, variant, number, "fibers", Shape(hidden=13, experts=3, iterations=10), "trace=on"))
