"""Rings of stages of the int4 experts, and staging `reg`: many launches with delays, aborts and the race detector.

Every bit is checked, and every synchronisation is left out or weakened once, which some run has to notice. What the CPU
cannot show is the Warp::sync() in front of a consumer's arrival: lanes are turns of one thread there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from attack import PLANTED, RACE_EXIT, SEEDS, SLOW, TIMED_OUT, WRONG_RESULT, assert_right, run_program
from left_out import INT4_RING_FILES, LEFT_OUT, Edit, barriers_in, numbered_program, sites_of
from toolchains import SAMPLE, program

pytestmark = pytest.mark.programs("tests/cpp/int4_ring.cpp")

RINGS = ("ring", "wide")
STAGINGS = (*RINGS, "reg")
SMALL = (384, 256)
MEMORY = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", *PLANTED, *SAMPLE)
SOAK = [pytest.mark.soak, pytest.mark.timeout(1800)]


def arguments(staging: str, hidden: int, intermediate: int, rounds: int, seed: int) -> list[str]:
    return [staging, *map(str, (hidden, intermediate, rounds, seed))]


# The last stage of a tile is a part of one in K2 or in K4, and so is the last tile of some tokens.
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(640, 384), (384, 640)])
@pytest.mark.parametrize("rounds", [2, pytest.param(100, marks=SOAK)])
def test_delayed_launches_are_right_and_aborted_ones_end(
    staging: str, hidden: int, intermediate: int, rounds: int
) -> None:
    done = run_program(program("int4_ring", *SLOW), *arguments(staging, hidden, intermediate, rounds, seed=rounds))
    assert_right(done)


@pytest.mark.soak  # a build of its own
@pytest.mark.parametrize("staging", STAGINGS)
def test_memory_is_used_as_it_should(staging: str) -> None:
    """Copies that come after an abort too: none into a block that is gone."""
    assert_right(run_program(program("int4_ring", *MEMORY), *arguments(staging, *SMALL, rounds=10, seed=1)))


# ---- the race detector, one thing left out at a time ----

STAGES, REG, BARRIER = *INT4_RING_FILES, "platform/bulk_loops.h"
EDITS = (
    # What a wait or an arrival orders.
    Edit(
        BARRIER,
        "void arrive() { add_acq_rel_device(&arrived_, 1u); }",
        """void arrive() {
        left_out("release") ? add_relaxed_device(&arrived_, 1u) : add_acq_rel_device(&arrived_, 1u);
    }""",
    ),
    Edit(
        BARRIER,
        "load_acquire_device(&arrived_)",
        '(left_out("acquire") ? load_relaxed_system(&arrived_) : load_acquire_device(&arrived_))',
    ),
    # empty: the producer does not wait; a consumer does not arrive, or before it reads; one is not waited for.
    Edit(STAGES, "if (at.round) shared.empty", 'if (at.round && !left_out("wait_empty")) shared.empty'),
    Edit(
        STAGES,
        "    multiply(shared.slots[at.slot], [&] { warp.leader([&] { shared.empty[at.slot].arrive(); }); });",
        """    if (left_out("give_back_early")) shared.empty[at.slot].arrive();
    const bool gives_back = !left_out("give_back") && !left_out("give_back_early");
    multiply(shared.slots[at.slot], [&] { if (gives_back) shared.empty[at.slot].arrive(); });""",
    ),
    Edit(STAGES, "init(num_consumers)", 'init(num_consumers - left_out("one_consumer"))'),
    # full: a consumer does not wait, or not for copies under way once the producer gave up; the copies of x are not
    # announced, or rows come behind all copies.
    Edit(
        STAGES,
        "shared.full[at.slot].wait(warp, at.round);",
        """const bool leaves = left_out("leaves_early") && load_relaxed_block(&shared.given_up.piece) != ~uint64_t{0};
        if (!left_out("wait_full") && !leaves) shared.full[at.slot].wait(warp, at.round);""",
    ),
    Edit(STAGES, "+ Kernel::x_bytes(rows, count)", '+ (left_out("x_bytes") ? 0 : Kernel::x_bytes(rows, count))'),
    Edit(STAGES, "slot.rows = rows;", 'if (!left_out("rows")) slot.rows = rows;'),
    Edit(
        STAGES,
        "Kernel::copy_x(args, slot, rows, first, count, full);",
        'Kernel::copy_x(args, slot, rows, first, count, full);\nif (left_out("rows")) slot.rows = rows;',
    ),
    # given_up: not stored, or while consumers look already; the tile's other stages do not end.
    Edit(
        STAGES,
        """shared.given_up.tell(tile.number);
                    full.arrive();""",
        """const auto store = [&] { shared.given_up.tell(tile.number); };
        if (!left_out("given_up") && !left_out("given_up_late")) store();
        if (!left_out("end_stages")) full.arrive();
        if (left_out("given_up_late")) {
            for (uint32_t spins = 512; spins < 600;) warp.relax(spins);  // asleep
            store();
        }""",
    ),
    # Which of its two words a block of `reg` looks at.
    Edit(REG, "(warp, args, tile % 2)", '(warp, args, left_out("turns") ? 0 : tile % 2)'),
)
BARRIERS = barriers_in(INT4_RING_FILES)
SITES = {str(number): place for number, place in enumerate(BARRIERS)} | {name: name for name in sites_of(EDITS)}
OF_REG = ("turns", *(number for number, place in SITES.items() if place.startswith(REG)))

NOTICED = (RACE_EXIT, WRONG_RESULT)
TOO_EARLY = ("wait_empty", "one_consumer", "give_back_early", "x_bytes")
MAY_HANG = (*TOO_EARLY, "give_back", "given_up", "given_up_late", "end_stages")
"""Those that may end in a wait for what never comes, some since a barrier lost count of phases or bytes."""
SLOW_TO_FIND = ("given_up_late", "end_stages", "leaves_early")
"""Those that `make test` leaves to `make soak`, as all of the other ring."""


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return numbered_program(tmp_path_factory.mktemp("numbered"), "int4_ring", INT4_RING_FILES, EDITS)


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize(("hidden", "intermediate", "rounds"), [(*SMALL, 2), pytest.param(640, 384, 20, marks=SOAK)])
def test_launches_have_no_race(numbered: Path, staging: str, hidden: int, intermediate: int, rounds: int) -> None:
    assert_right(run_program(numbered, *arguments(staging, hidden, intermediate, rounds, seed=1)))


def mutants() -> list[object]:
    found: list[object] = []
    for site, name in SITES.items():
        for staging in ("reg",) if site in OF_REG else RINGS:
            is_short = staging != "wide" and site not in SLOW_TO_FIND
            found.append(pytest.param(staging, site, id=f"{staging}-{name}", marks=[] if is_short else SOAK))
    return found


@pytest.mark.parametrize(("staging", "site"), mutants())
def test_what_is_left_out_is_noticed(numbered: Path, staging: str, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEFT_OUT, site)
    noticed = (*NOTICED, TIMED_OUT) if site in MAY_HANG else NOTICED
    exits = []
    for seed in SEEDS:
        exits.append(run_program(numbered, *arguments(staging, *SMALL, 4, seed), "limit_ms=2000").returncode)
        if exits[-1] in noticed:
            return
    pytest.fail(f"{SITES[site]} left out, and nothing noticed: exits {exits}")
