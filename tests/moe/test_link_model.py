"""The model of the links: fair rates, walks that wait for each other, and orders in which ranks do not meet."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import link_model
from fluid import Part, Simulation, Walk, fair_rates
from link_model import Load, Rates, leg_times, link_walks, make_call, times_least
from link_walks import AFTER, BEFORE, IN_STEP, VARIANTS, Grid, Orders, by_source, in_turns

GRID = Grid(blocks=8, warps=4)
"""So small that a rank's rows are many waves."""


def result(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


pytestmark = pytest.mark.programs(
    *(f"benchmarks/{name}.py" for name in ("fluid", "link_model", "link_walks", "visits")),
    *(f"benchmarks/results/{name}.json" for name in ("link_model", *link_model.FITTED, *link_model.HELD_OUT)),
)

# ---- fair rates


@st.composite
def flows(draw):
    """(uses, capacities, most) of some flows; each uses a resource."""
    num_flows, num_resources = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    part = st.sampled_from([0.0, 0.0, 0.25, 1.0, 1.0, 3.0])
    rows = st.lists(part, min_size=num_resources, max_size=num_resources).filter(any)
    uses = np.array(draw(st.lists(rows, min_size=num_flows, max_size=num_flows)))
    capacities = np.array(
        draw(st.lists(st.sampled_from([1.0, 2.0, 7.0]), min_size=num_resources, max_size=num_resources))
    )
    most = np.array(draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, np.inf]), min_size=num_flows, max_size=num_flows)))
    return uses, capacities, most


@settings(max_examples=300, deadline=None)
@given(flows())
def test_rates_are_max_min_fair(given_flows):
    uses, capacities, most = given_flows
    rates = fair_rates(uses, capacities, most)
    load = rates @ uses
    assert (load <= capacities * (1 + 1e-6)).all()
    assert (rates <= most).all()
    full = load >= capacities * (1 - 1e-6)
    for flow, rate in enumerate(rates):
        # Each is held by its own limit, or by a full resource of which nobody else's rate is higher.
        highest = [rates[uses[:, r] > 0].max() for r in np.flatnonzero(full & (uses[flow] > 0))]
        assert rate >= most[flow] * (1 - 1e-6) or any(rate >= other * (1 - 1e-6) for other in highest)


def test_a_flow_that_nothing_holds_is_refused():
    with pytest.raises(ValueError, match="uses no resource"):
        fair_rates(np.zeros((1, 2)), np.ones(2))


# ---- walks


@st.composite
def legs(draw):
    """Walks of some ranks over links: parts to one rank or several, rows unequal, some none."""
    num_ranks = draw(st.integers(2, 5))
    walks = []
    for rank in range(num_ranks):
        parts = []
        for _ in range(draw(st.integers(0, 4))):
            sent = np.array(draw(st.lists(st.sampled_from([0, 0, 1, 2, 9]), min_size=num_ranks, max_size=num_ranks)))
            sent[rank] = 0
            if sent.any():
                uses = np.concatenate([np.where(np.arange(num_ranks) == rank, sent.sum(), 0), sent])
                parts.append(Part(float(sent.sum()), uses.astype(float)))
        walks.append(Walk(parts))
    return walks


@settings(max_examples=150, deadline=None)
@given(legs(), st.randoms(use_true_random=False))
def test_all_is_moved_in_no_less_than_the_busiest_link_needs(walks, randomly):
    moved = sum((part.uses for walk in walks for part in walk.parts), start=np.zeros(2 * len(walks)))
    simulation = Simulation(walks, np.full(2 * len(walks), 3.0))
    assert simulation.used == pytest.approx(moved)
    assert simulation.now >= moved.max() / 3.0 * (1 - 1e-6)
    order = list(range(len(walks)))
    randomly.shuffle(order)
    shuffled = Simulation([walks[i] for i in order], np.full(2 * len(walks), 3.0))
    assert shuffled.ended == pytest.approx(simulation.ended[order])


def test_who_takes_is_no_faster_than_who_makes():
    makes = Walk([Part(10, np.array([10.0, 0]), makes={0: 10})])
    takes = Walk([Part(1, np.array([0, 1.0]), takes={0: (0, 5)}), Part(1, np.array([0, 1.0]), takes={0: (5, 10)})])
    simulation = Simulation([makes, takes], np.array([1.0, 1.0]))
    assert simulation.ended == pytest.approx([10, 10], rel=1e-5)
    assert Simulation([makes, takes], np.array([10.0, 0.1])).ended == pytest.approx([1, 20], rel=1e-5)
    waits = Walk([Part(1, np.array([0, 1.0]), takes={0: (8, 10)})])
    assert Simulation([makes, waits], np.array([1.0, 100.0])).ended == pytest.approx([10, 10], rel=1e-5)


def test_a_walk_starts_when_those_before_it_have_ended():
    parts = [Part(1, np.ones(1))]
    simulation = Simulation([Walk(parts, after=(1,)), Walk(parts), Walk([], after=(0,))], np.ones(1))
    assert simulation.ended == pytest.approx([2, 1, 2])


def test_walks_that_wait_for_nothing_that_comes_are_refused():
    part = Part(1, np.ones(1), takes={0: (0, 1)})
    with pytest.raises(ValueError, match="take what no walk makes"):
        Simulation([Walk([part])], np.ones(1))
    with pytest.raises(ValueError, match="wait for each other"):
        Simulation([Walk([part], after=(1,)), Walk([part], after=(0,))], np.ones(1))


# ---- orders


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_every_row_is_visited_once(counts, data):
    rank = data.draw(st.integers(0, len(counts) - 1))
    rows = sorted((source, row) for source, count in enumerate(counts) for row in range(count))
    for order in (by_source, in_turns):
        visited = list(zip(*(of.tolist() for of in order(counts, rank)), strict=True))
        assert sorted(visited) == rows
    first = [source for source, row in visited if row == 0]
    assert first == [peer for i in range(len(counts)) if counts[peer := (rank + 1 + i) % len(counts)]]


def draw_load(num_ranks: int, kind: str) -> Load:
    randomly = np.random.default_rng(num_ranks)
    tokens = np.full(num_ranks, 64) if kind == "equal" else randomly.integers(1, 65, num_ranks)
    if kind == "with zeros":
        tokens[randomly.permutation(num_ranks)[: max(1, num_ranks // 4)]] = 0
    return Load(kind, tuple(tokens.tolist()), 64)


@pytest.mark.parametrize("kind", ["equal", "unequal", "with zeros"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 32])
def test_no_order_makes_ranks_meet_at_one_receiver(num_ranks, kind):
    """Over the links alone a leg takes little more than the busiest of them needs: a receiver at which all ranks met
    would leave the others idle. A wave of few rows is never quite even.
    """
    load = draw_load(num_ranks, kind)
    routing = load.routing()
    looked_at = set()  # variants share legs
    for variant in VARIANTS:
        for leg, walks in link_walks(make_call(load, routing, variant, AFTER, GRID)).items():
            parts = b"".join(part.uses.tobytes() for walk in walks for part in walk.parts)
            if parts not in looked_at:
                assert times_least(walks) <= 1.4, (variant, leg)
            looked_at.add(parts)


@pytest.mark.parametrize(("num_ranks", "least"), [(4, 1.6), (8, 2.0), (64, 4.0)])
def test_source_by_source_ranks_meet(num_ranks, least):
    load = draw_load(num_ranks, "equal")
    routing = load.routing()
    orders = (IN_STEP,) if num_ranks == 64 else (BEFORE, IN_STEP)
    for order in orders:
        for variant in ("dedup", "reduce", "pipelined"):
            call = make_call(load, routing, variant, order, GRID, partitions=1)
            assert times_least(link_walks(call)["combine"]) >= least, variant


def test_what_balanced_brings_source_by_source_it_sends_back_so():
    """Where the rows of one expert are many waves; those of `fused` are of all sources, whatever the order. In turns it
    would not.
    """
    load = Load("many", (512,) * 8, 512)
    routing = load.routing()
    turned = Orders(in_turns, in_turns)
    found = {
        (variant, order): times_least(link_walks(make_call(load, routing, variant, order, GRID))["combine"])
        for variant in ("fused", "balanced")
        for order in (IN_STEP, turned)
    }
    assert found["balanced", IN_STEP] > 1.5
    assert max(found["balanced", turned], found["fused", turned], found["fused", IN_STEP]) < 1.4


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("order", [BEFORE, AFTER])
def test_a_call_moves_the_rows_of_its_routing(variant, order):
    load = draw_load(4, "with zeros")
    routing = load.routing()
    call = make_call(load, routing, variant, order, GRID)
    once, each = (rows - np.diag(np.diag(rows)) for rows in (routing.once, routing.each))
    sent = {
        "dispatch": once if variant in ("dedup", "reduce", "pipelined") else each,
        "combine": once.T if variant in ("reduce", "pipelined") else each.T,
    }
    for leg, walks in link_walks(call).items():
        moved = sum(part.uses for walk in walks for part in walk.parts)
        wanted = np.concatenate([sent[leg].sum(axis=1), sent[leg].sum(axis=0)]) * load.shape.row_bytes
        assert moved == pytest.approx(wanted)
    simulation = Simulation(call.walks, Rates(358, 3000).capacities(4))
    assert simulation.used == pytest.approx(sum(part.uses for walk in call.walks for part in walk.parts))


def test_a_partition_of_no_more_rows_than_warps_has_no_order():
    load = Load("few", (32,) * 4, 32)
    calls = [make_call(load, load.routing(), "pipelined", order, Grid(9, 64)) for order in (BEFORE, IN_STEP, AFTER)]
    times = [leg_times(call, Rates(358, 3000))["call"] for call in calls]
    assert times == pytest.approx([times[0]] * 3)


# ---- what is kept


def measured_us(row: dict) -> float:
    (load,) = (load for load in result(row["file"])["loads"] if load["load"] == row["load"])
    told = f"/{row['partitions']}" if "partitions" in row else row["variant"]
    (found,) = (legs for label, legs in load["rows"].items() if label == told or label.endswith(f" {told}"))
    return found[row["leg"]]["median_us"]


def test_the_kept_points_are_those_that_were_measured():
    kept = result("link_model")
    assert kept["rates"]["link_gb_per_s"] == link_model.link_rate()
    assert len(kept["fitted"]) == len(link_model.FITTED) * 2 * (2 * len(VARIANTS) - 1)
    for row in (*kept["fitted"], *kept["held_out"]):
        assert row["measured_us"] == measured_us(row)
        assert row["error"] == pytest.approx(row["model_us"] / row["measured_us"] - 1, abs=1e-3)
    for name, error in kept["error"].items():
        assert error == link_model.summarise(kept[name])


def test_the_kept_times_are_those_of_the_model():
    """Of two ranks; the others take long. Where ranks meet, the last bits of a number decide who is first."""
    kept = result("link_model")
    rates = Rates(**kept["rates"])
    calls = [(call, rows) for call, rows in link_model.measured_calls() if rows[0]["ranks"] == 2]
    now = link_model.compare(calls, rates)
    then = [row for row in kept["fitted"] if row["ranks"] == 2]
    assert [row["model_us"] for row in now] == pytest.approx([row["model_us"] for row in then], rel=0.02)


def test_what_was_predicted_keeps_the_links_busy():
    """With 4,096 tokens on every rank."""
    rows = result("link_model")["predicted"]
    assert {row["ranks"] for row in rows} == {2, 4, 8, 16}
    for row in rows:
        for name in ("in_step", "before", "after"):
            assert row[f"{name}_us"] >= row["wire_us"]
        assert (row["after_times_least"] or 1) <= 1.15
        if (row["variant"], row["leg"]) == ("reduce", "combine") and row["ranks"] > 2:
            assert row["before_times_least"] > 1.8


def test_another_routing_than_the_measured_one_is_refused(monkeypatch):
    monkeypatch.setattr(link_model, "SEED", 1)
    monkeypatch.setattr(Load.routing, "__defaults__", (1,))
    with pytest.raises(ValueError, match="as measured"):
        next(link_model.loads_of("moe_2"))
