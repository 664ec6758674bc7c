"""Every variant and both barriers under the sanitizers: a thread a warp, all ranks in one process."""

from __future__ import annotations

import shutil

import pytest
from attack import RACE_EXIT, SAMPLED_NUMBERS, TSAN, VARIANTS, Shape, assert_right, run_program, stress
from toolchains import CSRC, GXX, ROOT, SAMPLE, compile_cached, program

SHAPES = {
    "several_blocks": Shape(iterations=20),
    "one_warp": Shape(ranks=2, blocks=1, warps=1, tokens=5, experts=4, topk=3, iterations=60),
    "no_tokens": Shape(ranks=3, tokens=0, experts=3, topk=1, iterations=30),
    "one_rank": Shape(ranks=1, tokens=9, experts=5, topk=4),
    "odd_row": Shape(ranks=4, blocks=3, warps=1, tokens=6, hidden=13, experts=4, topk=1, iterations=25),
}
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
RECORDER_TSAN = ("-O1", "-g1", "-fsanitize=thread")
MEMORY = ("-O0", "-g1", *SANITIZERS, "-DTK_POISON_CONSUMED", *SAMPLE)


def races() -> list[object]:
    """Every variant in every shape; four of eight variants run one shape in `make test` and all in `make soak`."""
    kept = ("flag", "balanced", "pipelined", "overlapped")
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


@pytest.mark.programs("tests/cpp/p2p_stress.cpp")
@pytest.mark.parametrize(("shape", "variant"), races())
def test_variants_have_no_race(shape, variant):
    assert_right(stress(TSAN, variant, "bf16", "threads", shape))


@pytest.mark.programs("tests/cpp/p2p_stress.cpp")
@pytest.mark.parametrize("trace", ["on", "ring"])
@pytest.mark.parametrize("variant", ["balanced", "pipelined"])
def test_recording_has_no_race(variant, trace):
    assert_right(stress(TSAN, variant, "bf16", "threads", Shape(iterations=15), f"trace={trace}"))


TRACKS = ("3", "2", "8", "60")
"""Blocks, warps, records of a track, launches that use the same region."""


@pytest.mark.programs("tests/cpp/tracks.cpp")
@pytest.mark.parametrize("record_format", ["span", "ring"])
def test_tracks_side_by_side_have_no_race(record_format):
    assert_right(run_program(program("tracks", *RECORDER_TSAN), record_format, *TRACKS))


@pytest.mark.programs("tests/cpp/fabric_turns.cpp")
def test_turns_of_a_transfer_engine_have_no_race():
    assert_right(run_program(program("fabric_turns", *RECORDER_TSAN), "4", "4000"))


@pytest.mark.programs("tests/cpp/tracks.cpp")
@pytest.mark.parametrize("planted", ["track", "record"])
@pytest.mark.parametrize("record_format", ["span", "ring"])
def test_a_writer_in_another_track_is_noticed(record_format, planted):
    done = run_program(program("tracks", *RECORDER_TSAN), record_format, *TRACKS, planted)
    assert done.returncode == RACE_EXIT, done.stderr


REACHING = {
    "ring": ("trace/pair_recorder.h", "ring_mask_ = (1u << ring_bits_) - 1;", "ring_mask_ = (2u << ring_bits_) - 1;"),
    "span": ("platform/branching_stores.h", "&& low <= limit;", "&& low <= limit + sizeof(Record);"),
}
"""By format: what makes its tracks reach into the next ones."""


@pytest.mark.programs("tests/cpp/tracks.cpp")
@pytest.mark.parametrize("record_format", REACHING)
def test_a_track_that_reaches_into_the_next_is_noticed(tmp_path, record_format):
    copy = tmp_path / "csrc"
    shutil.copytree(CSRC, copy)
    name, right, wrong = REACHING[record_format]
    assert (copy / name).read_text().count(right) == 1
    (copy / name).write_text((copy / name).read_text().replace(right, wrong))
    binary = compile_cached((*GXX, *RECORDER_TSAN), ROOT / "tests" / "cpp" / "tracks.cpp", "", copy)
    assert run_program(binary, record_format, *TRACKS).returncode == RACE_EXIT
    (other,) = set(REACHING) - {record_format}
    assert_right(run_program(binary, other, *TRACKS))


@pytest.mark.programs("tests/cpp/barriers.cpp")
@pytest.mark.parametrize(
    "arguments", [("grid", "threads", "1", "4", "3", "200"), ("rank", "threads", "3", "1", "1", "300")], ids=str
)
def test_barriers_have_no_race(arguments):
    assert_right(run_program(program("barriers", *TSAN), *arguments))


@pytest.mark.programs("tests/cpp/p2p_stress.cpp")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("number", SAMPLED_NUMBERS)
def test_memory_is_used_as_it_should(variant, number):
    assert_right(stress(MEMORY, variant, number, "fibers", Shape(ranks=4, blocks=3, experts=8, iterations=10)))
    assert_right(stress(MEMORY, variant, number, "fibers", Shape(hidden=13, experts=3, iterations=10), "trace=on"))
