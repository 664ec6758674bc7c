"""What the order of rows costs where ranks share links: the calls of benchmarks/moe.py, computed.

    python benchmarks/link_model.py [--predict 8 16]

A rank's link takes so many bytes a us out and as many in, its memory so many. Kernels move rows in the order in which
their warps walk over them (link_walks.py), and rates are max-min fair (fluid.py). Which rows go where is drawn as
benchmarks/moe.py draws it. Three constants, the same for all numbers of ranks, variants and loads:

link      measured: one GPU that sends alone with a flag behind each row, the most of links_4.json
memory    fitted: every row that is read or written, by its own rank or by a peer
latency   fitted, added to each leg: launches, counts there and back, the first row, the last flag

The two are fitted to all legs of moe_2.json and moe_4_before.json together. Held out are calls of `pipelined` with many
tokens in other numbers of partitions (moe_sweep_2.json, moe_sweep_4.json); with few tokens each partition costs some 8
us, which is not in the model. Orders: `before`, source by source on every rank; `in step`, the same where all warps of
a rank keep together, so that no rank gets away from the others; `after`, sources in turn. What is called predicted was
not measured: links may carry less where there are more ranks. Needs no GPU, and takes about a minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from fluid import Part, Simulation, Walk
from harness import Table, read_results, write_results
from link_walks import AFTER, BEFORE, IN_STEP, VARIANTS, Call, Grid, Orders, Routing
from moe import SEED

from tracekern.moe.p2p.pipeline import num_partitions
from tracekern.moe.routing import draw_topk
from tracekern.moe.shape import MoeShape

ORDERS = {"in_step": IN_STEP, "before": BEFORE, "after": AFTER}
FITTED = {"moe_2": "before", "moe_4_before": "before"}
"""Results of benchmarks/moe.py, and the order of the kernels that were measured."""
HELD_OUT = {"moe_sweep_2": "before", "moe_sweep_4": "before"}
PROBED_GB_PER_S = (2500.0, 3100.0, 3800.0, 5000.0)
"""Rates of memory that are simulated. Between two of them times are taken to be linear in the time of a byte."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """tokens: of each rank. most: that the shape allows."""

    name: str
    tokens: tuple[int, ...]
    most: int

    @property
    def shape(self) -> MoeShape:
        return MoeShape(len(self.tokens), self.most, 256, 8, 7168, "bf16")

    def routing(self, seed: int = SEED) -> Routing:
        """As draw_batch() draws it, without the rows themselves."""
        generators = [np.random.default_rng([seed, rank, 0]) for rank in range(len(self.tokens))]
        drawn = zip(self.tokens, generators, strict=True)
        chosen = [draw_topk(self.shape, tokens, generator, "uniform") for tokens, generator in drawn]
        return Routing(chosen, self.shape.num_experts)


@dataclass(frozen=True)
class Rates:
    """The constants of the model."""

    link_gb_per_s: float
    memory_gb_per_s: float
    latency_us: float = 0.0

    def capacities(self, num_ranks: int) -> np.ndarray:
        """Bytes a us of what each rank sends, what it receives, and its memory."""
        return np.repeat([self.link_gb_per_s, self.link_gb_per_s, self.memory_gb_per_s], num_ranks) * 1e3


def make_call(
    load: Load, routing: Routing, variant: str, orders: Orders, grid: Grid | None = None, partitions: int = 0
) -> Call:
    """partitions: 0: as many as the pipelined variant takes by itself."""
    grid = grid or Grid()
    partitions = partitions or num_partitions(load.shape, grid.sending_warps // 2)
    return Call(variant, routing, load.shape.row_bytes, orders, grid, partitions)


def leg_times(call: Call, rates: Rates) -> dict[str, float]:
    """us of each leg and of the call, of the rank that takes longest; what a leg is says benchmarks/moe.py."""
    ended = Simulation(call.walks, rates.capacities(call.routing.num_ranks)).ended
    ends = np.array([[ended[walks].max() for walks in kernels] for kernels in call.kernels])
    times = {"call": float(ends[:, -1].max()) + 2 * rates.latency_us}
    if call.num_dispatch:
        dispatched = ends[:, call.num_dispatch - 1]
        times["dispatch"] = float(dispatched.max()) + rates.latency_us
        times["combine"] = float((ends[:, -1] - dispatched).max()) + rates.latency_us
    return times


def link_walks(call: Call) -> dict[str, list[Walk]]:
    """What goes over the links in each leg: in the order of the walks, but waiting for nothing, and memory is free."""
    num_links = 2 * call.routing.num_ranks
    legs: dict[str, list[Walk]] = {"dispatch": [], "combine": []}
    for walk in call.walks:
        sent = [part for part in walk.parts if part.uses[:num_links].any()]
        for odd, leg in enumerate(legs):
            parts = [part for part in sent if call.channel_of(min(part.makes)) % 2 == odd]
            legs[leg].append(Walk([Part(part.size, part.uses[:num_links]) for part in parts]))
    return legs


def times_least(walks: list[Walk]) -> float:
    """Time over the links alone, as a multiple of what the busiest link needs: 1 where that is never idle."""
    moved = sum((part.uses for walk in walks for part in walk.parts), start=np.zeros(1))
    if not moved.any():
        return 1.0
    return float(Simulation(walks, np.ones(len(moved))).now / moved.max())


def wire_bytes(routing: Routing, variant: str, row_bytes: int) -> dict[str, int]:
    """Bytes of the busiest rank in its busier direction; of a call, where both legs may overlap."""
    once, each = (rows - np.diag(np.diag(rows)) for rows in (routing.once, routing.each))
    out = once if variant in ("dedup", "reduce", "pipelined") else each
    back = (once if variant in ("reduce", "pipelined") else each).T
    legs = {"dispatch": out, "combine": back, "call": out + back}
    return {leg: int(max(rows.sum(0).max(), rows.sum(1).max())) * row_bytes for leg, rows in legs.items()}


# ---- the points that were measured


def loads_of(name: str) -> Iterator[tuple[Load, Routing, Row]]:
    """Loads of a result of benchmarks/moe.py, each with its rows. Raises ValueError if another routing was measured."""
    result = read_results(name)
    for measured in result["loads"]:
        most = result["options"]["many" if measured["load"].endswith("each") else "tokens"]
        load = Load(measured["load"], tuple(measured["tokens"]), most)
        routing = load.routing()
        drawn = wire_bytes(routing, "dedup", load.shape.row_bytes)
        if (drawn["dispatch"], drawn["combine"]) != (measured["once_bytes"], measured["each_bytes"]):
            raise ValueError(
                f"{name}, {load.name}: drew {drawn['dispatch']} bytes once and {drawn['combine']} each; wanted "
                f"{measured['once_bytes']:.0f} and {measured['each_bytes']:.0f}, as measured; measure anew"
            )
        yield load, routing, measured["rows"]


def measured_calls() -> Iterator[tuple[Call, list[Row]]]:
    """Calls to which the model is fitted, each with its legs."""
    for name, order in FITTED.items():
        for load, routing, rows in loads_of(name):
            for variant in VARIANTS:
                about = {"file": name, "ranks": routing.num_ranks, "load": load.name, "variant": variant}
                legs = {leg: found["median_us"] for leg, found in rows[variant].items()}
                if len(legs) > 1:
                    del legs["call"]
                found = [{**about, "order": order, "leg": leg, "measured_us": us} for leg, us in legs.items()]
                yield make_call(load, routing, variant, ORDERS[order]), found


def held_out_calls() -> Iterator[tuple[Call, list[Row]]]:
    """Calls of the pipelined variant with many tokens in other numbers of partitions, on a grid of their own."""
    for name, order in HELD_OUT.items():
        options = read_results(name)["options"]
        grid = Grid(options["blocks"], options["warps"])
        for load, routing, rows in loads_of(name):
            for label, legs in rows.items() if load.name.endswith("each") else ():
                partitions = int(label.rpartition("/")[2])
                about = {"file": name, "ranks": routing.num_ranks, "load": load.name, "variant": "pipelined"}
                row = {**about, "partitions": partitions, "order": order, "leg": "call"}
                row["measured_us"] = legs["call"]["median_us"]
                yield make_call(load, routing, "pipelined", ORDERS[order], grid, partitions), [row]


def compare(calls: list[tuple[Call, list[Row]]], rates: Rates) -> list[Row]:
    """The rows of all legs, with the model's times."""
    found = []
    for call, rows in calls:
        times = leg_times(call, rates)
        for row in rows:
            model_us = times[row["leg"]]
            found.append({**row, "model_us": round(model_us, 2), "error": round(model_us / row["measured_us"] - 1, 4)})
    return found


def summarise(rows: list[Row]) -> Row:
    worst = max(rows, key=lambda row: abs(row["error"]))
    return {"points": len(rows), "median": statistics.median(abs(row["error"]) for row in rows), "worst": worst}


def fit(calls: list[tuple[Call, list[Row]]], link_gb_per_s: float) -> Rates:
    """Memory's rate and the latency for which the mean square of log(model / measured) is least."""
    probed = [[leg_times(call, Rates(link_gb_per_s, rate)) for rate in PROBED_GB_PER_S] for call, _ in calls]
    points = [(row, times) for (_, rows), times in zip(calls, probed, strict=True) for row in rows]
    measured = np.array([row["measured_us"] for row, _ in points])
    num_legs = np.array([2 if row["leg"] == "call" else 1 for row, _ in points])
    rates = np.arange(PROBED_GB_PER_S[0], PROBED_GB_PER_S[-1] + 1, 10)
    latencies = np.arange(0, 40, 0.1)
    at_probes = [[times[row["leg"]] for times in sweep] for row, sweep in points]
    times = np.array([np.interp(-1 / rates, -1 / np.array(PROBED_GB_PER_S), sweep) for sweep in at_probes])
    model = times[:, :, None] + num_legs[:, None, None] * latencies
    score = (np.log(model / measured[:, None, None]) ** 2).mean(axis=0)
    rate, latency = np.unravel_index(score.argmin(), score.shape)
    return Rates(link_gb_per_s, float(rates[rate]), round(float(latencies[latency]), 1))


def link_rate() -> float:
    """GB/s of one GPU that sends alone, with a flag behind each row."""
    rows = read_results("links_4")["rows"]
    return float(max(row["gb_per_s"] for row in rows if row["kind"] == "stores, flags" and row["senders"] == 1))


# ---- what was not measured


def predict(num_ranks: int, rates: Rates) -> Iterator[Row]:
    """The legs of all variants in all orders, 4,096 tokens on every rank."""
    load = Load("4096 each", (4096,) * num_ranks, 4096)
    routing = load.routing()
    for variant in VARIANTS:
        known: dict[bytes, tuple[dict[str, float], dict[str, float]]] = {}  # orders that do the same are one
        found = {}
        for name, orders in ORDERS.items():
            call = make_call(load, routing, variant, orders)
            key = b"".join(part.uses.tobytes() for walk in call.walks for part in walk.parts)
            if key not in known:
                alone = {leg: times_least(walks) for leg, walks in link_walks(call).items()}
                known[key] = (leg_times(call, rates), alone)
            found[name] = known[key]
        for leg, num_bytes in wire_bytes(routing, variant, load.shape.row_bytes).items():
            if leg not in found["after"][0]:
                continue
            row: Row = {"ranks": num_ranks, "load": load.name, "variant": variant, "leg": leg}
            row["wire_us"] = round(num_bytes / rates.link_gb_per_s / 1e3, 2)
            for name, (times, alone) in found.items():
                row[f"{name}_us"] = round(times[leg], 2)
                row[f"{name}_times_least"] = round(alone[leg], 3) if leg in alone else None
            yield row


# ---- tables


def print_measured(title: str, rows: list[Row]) -> None:
    table = Table(f"\n{title}", ["ranks", "load", "variant", "order", "leg", "measured us", "model us", "error"])
    for row in rows:
        label = row["variant"] + (f" /{row['partitions']}" if "partitions" in row else "")
        times = (f"{row['measured_us']:,.0f}", f"{row['model_us']:,.0f}", f"{row['error']:+.0%}")
        table.add(str(row["ranks"]), row["load"], label, row["order"], row["leg"], *times)
    table.print()
    found = summarise(rows)
    worst = found["worst"]
    at = f"{worst['variant']}, {worst['leg']}, {worst['ranks']} ranks, {worst['load']}"
    print(f"  error of {found['points']} points: median {found['median']:.1%}, worst {worst['error']:+.1%} ({at})")


def print_predicted(rows: list[Row]) -> None:
    columns = ["ranks", "variant", "leg", "wire"]
    for name in ORDERS:
        columns += [name.replace("_", " "), ""]
    title = "\npredicted, 4,096 tokens each, us; in brackets: over the links alone, times what the busiest link needs"
    table = Table(title, columns)
    for row in rows:
        cells = []
        for name in ORDERS:
            alone = row[f"{name}_times_least"]
            cells += [f"{row[f'{name}_us']:,.0f}", f"({alone:.2f})" if alone else ""]
        table.add(str(row["ranks"]), row["variant"], row["leg"], f"{row['wire_us']:,.0f}", *cells)
    table.print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--predict", type=int, nargs="*", default=[8, 16], help="numbers of ranks, besides the measured ones"
    )
    options = parser.parse_args()
    calls = list(measured_calls())
    rates = fit(calls, link_rate())
    fitted, held_out = compare(calls, rates), compare(list(held_out_calls()), rates)
    ranks = {row["ranks"] for row in fitted} | set(options.predict)
    predicted = [row for num_ranks in sorted(ranks) for row in predict(num_ranks, rates)]
    print(f"link {rates.link_gb_per_s:.0f} GB/s, measured; memory {rates.memory_gb_per_s:,.0f} GB/s", end="")
    print(f" and {rates.latency_us:.1f} us a leg, fitted")
    print_measured("measured, and what the model was fitted to", fitted)
    print_measured("measured, and held out: `pipelined` in numbers of partitions", held_out)
    print_predicted(predicted)
    found = {
        "rates": asdict(rates),
        "error": {"fitted": summarise(fitted), "held_out": summarise(held_out)},
        "fitted": fitted,
        "held_out": held_out,
        "predicted": predicted,
    }
    write_results("link_model", found)


if __name__ == "__main__":
    main()
