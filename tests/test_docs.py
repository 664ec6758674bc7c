"""The figures that the documentation gives are those of the benchmarks whose results are kept."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from toolchains import ROOT
from typer.testing import CliRunner

import tracekern
from tracekern.analysis.findings import Findings
from tracekern.cli.app import app
from tracekern.record import sinks

LABELS = {"sorted over NCCL": "sorted (NCCL)", "all_to_all_vdev_2d": "vdev_2d (NVSHMEM)"}


@cache
def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


@cache
def text_of(name: str) -> str:
    """A document without its line breaks."""
    return " ".join((ROOT / "docs" / name).read_text().split())


def day(name: str) -> str:
    return results(name)["date"][:10]


def table(document: str, head: str) -> Iterator[list[str]]:
    """The cells of the rows of the table whose first line has `head`."""
    lines = iter((ROOT / "docs" / document).read_text().splitlines())
    next(line for line in lines if line.startswith("|") and head in line)
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]


def times(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def test_results_say_of_what_they_are():
    names = [path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")]
    told = {name: results(name) for name in names}
    assert [name for name in names if told[name]["benchmark"] != name] == []
    assert [name for name in names if not (told[name]["device"] and day(name))] == []


@pytest.mark.parametrize(
    ("name", "head", "has_limit"),
    [("moe_4", "219, 46, 7 and 164", (True, True)), ("moe_2", "219 and 46", (False, True))],
)
def test_times_of_the_moe_kernels(name, head, has_limit):
    loads = results(name)["loads"]
    assert [int(number) for number in re.findall(r"\d+", head)] == loads[0]["tokens"]
    assert loads[1]["tokens"] == [4096] * len(loads[0]["tokens"])
    assert day(name) in text_of("moe.md")
    if name == "moe_4":
        told = text_of("moe.md")
        limits, overlapped = (
            " and ".join(f"{load[key]:.0f}" for load in loads) for key in ("limit_us", "overlapped_limit_us")
        )
        assert f"out and back, at 371 GB/s: {limits} us." in told
        assert f"as `pipelined`, needs only {overlapped}," in told
    rows = list(table("moe.md", head))
    assert len(rows) >= 5
    for label, *cells in rows:
        wanted = []
        for load, with_limit in zip(loads, has_limit, strict=True):
            took = load["rows"][LABELS.get(label, label)]["call"]["median_us"]
            wanted += [f"{took:,.0f} us", *([times(took / load["limit_us"])] if with_limit else [])]
        assert cells == wanted, label


def test_what_links_carry():
    rows = [row for row in results("links_4")["rows"] if row["kind"] == "stores, flags"]
    alone, together = (max(row["gb_per_s"] for row in rows if row["senders"] == senders) for senders in (1, 4))
    (many,) = (load for load in results("moe_4")["loads"] if load["load"] == "4096 each")
    told = text_of("moe.md")
    assert f"one GPU alone reaches {alone:.0f} GB/s" in told
    assert f"four GPUs that all send to all others reach {together:.0f} GB/s each" in told
    assert f"`pipelined` moves {many['rows']['pipelined']['call']['gb_per_s']:.0f} GB/s" in told
    for leg, wanted in (("dispatch", "dispatch of `reduce` takes"), ("combine", "its combine")):
        row = many["rows"]["reduce"][leg]
        rate = f"{row['gb_per_s']:.0f} GB/s or {100 * row['share_of_limit']:.0f} %"
        assert f"{wanted} {row['median_us']:.0f} us, {rate}" in told


def test_what_the_order_of_rows_costs():
    found = results("link_model")
    told = text_of("moe.md")
    rates = found["rates"]
    assert f"the links ({rates['link_gb_per_s']:.0f} GB/s, measured)" in told
    assert f"memory ({rates['memory_gb_per_s']:,.0f} GB/s, fitted)" in told
    assert f"each leg takes {rates['latency_us']:.1f} us more" in told
    fitted, held_out = (
        (error["points"], f"{100 * error['median']:.1f}", f"{100 * abs(error['worst']['error']):.1f}")
        for error in (found["error"]["fitted"], found["error"]["held_out"])
    )
    assert f"Of the {fitted[0]} times measured on 2 and 4 H200 it is off by {fitted[1]} % in the median" in told
    assert f"and {fitted[2]} % at most, of {held_out[0]} calls that it was not fitted to by" in told
    assert f"by {held_out[1]} and {held_out[2]} %" in told
    measured = {
        row["ranks"]: f"{row['measured_us']:,.0f} us"
        for row in found["fitted"]
        if (row["variant"], row["leg"], row["order"]) == ("reduce", "combine", "before") and "each" in row["load"]
    }
    rows = [row for row in found["predicted"] if (row["variant"], row["leg"]) == ("reduce", "combine")]
    shown = list(table("moe.md", "source by source, measured"))
    assert len(shown) == len(rows)
    for cells, row in zip(shown, rows, strict=True):
        times = (row[f"{key}_us"] for key in ("before", "in_step", "after", "wire"))
        ranks = row["ranks"]
        assert cells == [str(ranks), measured.get(ranks, "-"), *(f"{us:,.0f} us" for us in times)]


def test_what_the_order_of_rows_was_worth_on_two_gpus():
    names = ("moe_2_h100_before", "moe_2_h100", "moe_2_h100_late_before", "moe_2_h100_late")
    measured = [results(name)["loads"][1] for name in names]
    assert [results(name)["options"]["late"] for name in names] == [-1, -1, 0, 0]
    shown = list(table("moe.md", "late, in turn"))
    assert len(shown) == 3
    for variant, *cells in shown:
        assert cells == [f"{load['rows'][variant]['call']['median_us']:,.0f} us" for load in measured], variant
    before, after = (load["rows"]["reduce"]["combine"]["median_us"] for load in measured[:2])
    assert f"The combine of `reduce` takes {after:.0f} us instead of {before:.0f}:" in text_of("moe.md")


def test_what_partitions_are_worth():
    few, many = (
        {name.split("/")[1]: row["call"]["median_us"] for name, row in load["rows"].items()}
        for load in results("moe_sweep_4")["loads"]
    )
    told = text_of("moe.md")
    assert f"8,192 tokens on four GPUs take {many['2']:,.0f} us, with 32 of them {many['32']:,.0f}" in told
    assert f"up to 16 tokens take {few['2']:.0f} us with two and {few['1']:.0f} with one" in told
    assert f"each costs some {(few['16'] - few['8']) / 8:.0f} us" in told


def test_which_resident_rank_was_late():
    rows, told = results("resident")["rows"], text_of("moe.md")
    named = {
        variant: [row["named"] == row["late"] for row in rows if row["variant"] == variant and row["late"] is not None]
        for variant in ("balanced", "pipelined")
    }
    first, second = (f"{sum(right)} of {len(right)}" for right in named.values())
    assert f"in {first} captures of `balanced` and in {second} of `pipelined`, each with a rank" in told
    alike = [row["named"] for row in rows if row["late"] is None]
    assert None not in alike
    assert f"In {len(alike) // 2} captures of each without a late rank it named one, too" in told
    assert f"one H100, {day('resident')}" in told


def test_the_report_on_resident_ranks_is_what_the_command_prints():
    shown = (ROOT / "docs" / "moe.md").read_text().partition("$ tracekern report traces/h200_resident\n")[2]
    lines = [line for line in shown.partition("```")[0].splitlines() if line.strip() != "..."]
    printed = CliRunner().invoke(app, ["report", str(ROOT / "traces" / "h200_resident")]).stdout.splitlines()
    assert len(lines) == 4
    assert [line for line in lines if line not in printed] == []


def added(row: dict[str, Any], digits: int) -> str:
    """What tracing adds to a call: the median of the pairs."""
    return f"{100 * (row['pair_ratio'] - 1):+.{digits}f} %"


def test_what_tracing_costs_the_pipeline():
    rows = {(row["tokens"], row["mode"]): row for row in results("overhead_pipeline_2")["rows"]}
    assert day("overhead_pipeline_2") in text_of("instrumenting.md")
    shown = list(table("instrumenting.md", "tokens of a rank"))
    assert len(shown) == len(rows) / 4
    for cells in shown:
        names = ("device", "nothing selected", "flight recorder", "host")
        modes = [rows[int(cells[0].replace(",", "")), mode] for mode in names]
        untraced = statistics.mean(row["off_us"] for row in modes)
        costs = [added(row, digits) for row, digits in zip(modes, (1, 1, 1, 0), strict=True)]
        assert cells[1:] == [f"{untraced:,.0f} us", *costs]
    host = [100 * (row["pair_ratio"] - 1) for (_, mode), row in rows.items() if mode == "host"]
    flight = [added(rows[tokens, "flight recorder"], digits) for tokens, digits in ((256, 1), (1, 0))]
    told = text_of("flight_recorder.md")
    assert f"+{min(host):.0f} to +{max(host):.0f} % of the bundled pipeline" in told
    assert f"{flight[0]} at 256 tokens, {flight[1]} at one" in told
    assert f"(`benchmarks/overhead_pipeline.py`, 2 H200, {day('overhead_pipeline_2')}.)" in told
    pipelined = {(row["tokens"], row["mode"]): row for row in results("overhead_pipeline_2_pipelined")["rows"]}
    few, many = (added(pipelined[tokens, "device"], 1) for tokens in (1, 256))
    assert f"{few} at 1 token and {many} at 256 into device memory" in text_of("instrumenting.md")


def test_what_tracing_costs_on_other_numbers_of_gpus():
    into_host = []
    for name, number in (("overhead_pipeline_1", "one H100"), ("overhead_pipeline_4", "four")):
        rows = results(name)["rows"]
        device = " / ".join(added(row, 1).removesuffix(" %") for row in rows if row["mode"] == "device")
        assert f"{device} % on {number} ({day(name)})" in text_of("instrumenting.md")
        host = [100 * (row["pair_ratio"] - 1) for row in rows if row["mode"] == "host"]
        into_host.append(f"+{min(host):.0f} to +{max(host):.0f} %")
    assert f"into host memory {' and '.join(into_host)}." in text_of("instrumenting.md")


@pytest.mark.parametrize("name", ["1", "2", "4", "2_pipelined", "4_pipelined"])
def test_a_call_makes_as_many_records_wherever_they_are_kept(name):
    made: dict[int, set[int]] = {}
    for row in results(f"overhead_pipeline_{name}")["rows"]:
        assert row["records_per_s"] == pytest.approx(row["records_per_call"] / row["on_us"] * 1e6)
        if row["mode"] in ("device", "host"):  # a flight recorder may store two a span
            made.setdefault(row["tokens"], set()).add(row["records_per_call"])
    assert made
    assert all(len(found) == 1 for found in made.values())


def test_why_records_leave_host_memory():
    """From which rate on they do is told beside MAX_HOST_STORES_PER_S; a track of a call has two stores of its own."""
    rows = {(row["tokens"], row["mode"]): row for row in results("overhead_pipeline_4")["rows"]}
    headers = sinks.STORES_PER_TRACK * 4 * 128 * 16  # kernels, blocks, warps
    rates, each_ns = [], []
    for (_, mode), row in rows.items():
        stores = row["records_per_call"] + headers
        if mode == "device":
            rates.append(stores / row["on_us"])
        elif mode == "host":
            each_ns.append((row["on_us"] - row["off_us"]) * 1e3 / stores)
    told = " ".join((ROOT / "tracekern" / "record" / "sinks.py").read_text().split())
    share = 100 * sinks.MAX_HOST_STORES_PER_S * max(each_ns) / 1e9
    assert f"{min(each_ns):.1f} to {max(each_ns):.1f} ns for each store are at most {share:.1f} % of" in told
    assert f"at {min(rates):.0f} to {max(rates):.0f} M stores a second" in told


def test_what_a_flight_recorder_costs_where_it_is_compared():
    rows = {(row["tokens"], row["mode"]): row for row in results("overhead_pipeline_2")["rows"]}
    flight, host = added(rows[256, "flight recorder"], 1), added(rows[256, "host"], 0)
    told = text_of("architecture.md")
    assert f"{flight.removesuffix(' %')} instead of {host} of the bundled pipeline's time at 256 tokens" in told


def test_what_a_span_costs():
    rows = results("recorder")["rows"]
    told = text_of("architecture.md")
    assert day("recorder") in told

    def of(probe: str, fmas: int = 1000, among: Any = rows) -> str:
        found = [row["added_ns"] for row in among if (row["probe"], row["fmas"]) == (probe, fmas)]
        return " / ".join(f"{cost:.0f}" for cost in found)

    assert f"a span costs {of('span')} ns at 4 / 16 / 32 warps per SM" in told
    assert f"with three fields {of('span, fields')}" in told
    ratios = [row["over_flashinfer"] for row in rows if (row["probe"], row["fmas"]) == ("span", 1000)]
    assert f"{' / '.join(f'{part:.2f}' for part in ratios)} of FlashInfer's macros" in told
    for bound in ("one checked store", "8-byte records"):
        assert f"{of(bound)} ns" in told
    assert f"leaves shared memory ({of('in shared memory')}, " in " ".join(told.split())
    proton = [of("proton", fmas, results("recorder")["proton"]) for fmas in (125, 1000)]
    assert f"adds {proton[0]} ns to short regions and {proton[1]} to long ones" in told
    launch_ms = [row["launch_ms"] for row in results("recorder")["proton"]]
    assert f"from launch to launch {min(launch_ms):.0f} to {max(launch_ms):.0f} ms go by" in told
    assert f"{of('span, deselected').split()[-1]} of the {of('span').split()[-1]} ns are left" in told
    both = [row["added_ns"] for row in rows if row["probe"] in ("span", "span, fields")]
    theirs = [row["added_ns"] for row in rows if row["probe"] == "flashinfer"]
    cells = f"{min(both):.0f} to {max(both):.0f} ns | - | not measured here | {min(theirs):.0f} to {max(theirs):.0f} ns"
    assert cells in text_of("comparison.md")


def test_what_a_launch_costs_its_host():
    (row,) = (row for row in results("launch")["rows"] if row["ranks"] == 8)
    told = text_of("architecture.md")
    first, others, eager = row["rank_0_us"], row["others_us"], row["rank_0_us"] / row["torch_us"]
    assert f"{first:.1f} us a launch on rank 0 of eight and {others:.1f} on the others, as much as {eager:.1f}" in told
    assert day("launch") in told


def test_a_launch_costs_its_host_the_same_for_few_and_many_tracks():
    told = text_of("architecture.md")
    phrases = {
        "counted": "where it was counted",
        "own": "where it reserves its region",
        "flight": "in a flight recorder",
    }
    for way, where in phrases.items():
        medians = [row["median_us"] for row in results("launch_tracks")["rows"] if row["launch"] == way]
        assert f"{min(medians):.1f} to {max(medians):.1f} us {where}" in told
    assert day("launch_tracks") in told


def test_rates_of_graphs():
    best = {
        sink: max(
            row["gb_per_s"] for row in results("graphs")["rows"] if row["sink"] == sink and not row["lost_replays"]
        )
        for sink in ("device", "host")
    }
    into_device = {row["tokens"]: row for row in results("graphs")["rows"] if row["sink"] == "device"}
    longer, first = (
        [f"{into_device[tokens][slow] - into_device[tokens][fast]:.0f}" for tokens in (1, 256)]
        for slow, fast in (("on_us", "off_us"), ("first_on_us", "on_us"))
    )
    assert f"took {longer[0]} us longer at 1 token and {longer[1]} at 256" in text_of("graphs.md")
    few = results("graphs")["replays"]
    assert f"The first {few} took {first[0]} and {first[1]} us more than the later ones" in text_of("graphs.md")
    on, off = (
        f"{min(times):.0f} to {max(times):.0f}"
        for times in ([row[key] for row in into_device.values()] for key in ("host_on_us", "host_off_us"))
    )
    assert f"took its host {on} us, an untraced one {off}." in text_of("graphs.md")
    told = f"nothing was lost at {best['device']:.1f} GB/s into device and {best['host']:.1f} GB/s into host memory"
    assert told in text_of("graphs.md")
    assert f"`benchmarks/graphs.py`, {day('graphs')}" in text_of("graphs.md")


def test_clocks_of_gpus():
    found = results("clocks_gpu_4")
    assert f"`{found['command']}`, 4 H200 of one host, {day('clocks_gpu_4')}" in text_of("clocks.md")
    medians = [statistics.median(map(abs, values)) for values in found["held_out_ns"].values()]
    worst, cupti = found["worst_held_out_ns"], found["containment"]
    measured = [cells[1] for cells in table("clocks.md", "| measured | goal |")]
    assert measured == [
        f"off by {min(medians):.0f} to {max(medians):.0f} ns in the median, {worst:.0f} ns at worst",
        f"{found['worst_closure_ns']:.0f} ns at worst",
        f"all, {cupti['median_margin_ns'] / 1e3:.2f} us from its edge in the median",
        f"{cupti['resolution_ticks'][0]} ns",
    ]
    assert f"within ±{cupti['host_hard_ns'] / 1e3:.2f} us" in text_of("clocks.md")
    assert cupti["outside_hard"] == 0
    trip = found["worst_held_out_trip_ns"]
    assert f"single ones of that tenth were off by {trip:.0f} ns at worst" in text_of("clocks.md")
    beside = results("clocks_gpu_2")
    off, trip = beside["worst_held_out_ns"], beside["worst_held_out_trip_ns"]
    told = (
        f"such rounds were off by {off:.0f} ns at worst, and single round trips by {trip:.0f} ns ({day('clocks_gpu_2')}"
    )
    assert told in text_of("clocks.md")
    flows = results("flows_4")
    assert (flows["violations"], flows["records_lost"], flows["doubts"]) == (0, 0, [])
    assert f"On 4 H200 none of {flows['arrows']:,} arrows did" in text_of("clocks.md")


def test_clocks_of_the_simulation():
    captures = results("clocks")["captures"]
    rows = {cells[0]: cells[1:] for cells in table("clocks.md", "| median | 95 % | largest |")}
    for label, key in (("hard_ns", "hard_ns"), ("true error", "error_ns"), ("sigma_ns", "sigma_ns")):
        values = np.array([capture[key] for capture in captures])
        assert rows[label] == [f"{value:.0f}" for value in (*np.quantile(values, [0.5, 0.95]), values.max())]
    told = text_of("clocks.md")
    hard_ns = statistics.median(capture["hard_ns"] for capture in captures)
    assert f"{len(captures)} captures of 8 ranks" in told
    assert f"largest of each: median {hard_ns:.0f} | the same |" in told
    assert not any(capture["tightened"] or capture["outside"] or capture["backwards"] for capture in captures)
    events, flows = (sum(capture[key] for capture in captures) for key in ("events", "flows"))
    assert f"{events:,} time stamps, none outside `hard_ns`; {flows:,} flow arrows, none backwards" in told


def test_what_analysis_and_the_report_cost():
    sizes = results("analysis")["sizes"]
    cpu_s = [
        sum(min(question["cpu_s"]) for name, question in size["questions"].items() if name != "all of a report")
        for size in sizes
    ]
    one, _, five, ten = (f"{seconds:.1f}" for seconds in cpu_s)
    assert f"{one} CPU seconds for 1 M spans, {five} for 5 M, {ten} for 10 M" in text_of("analysis.md")
    most = max(max(question["process_peak_bytes"]) for question in sizes[-1]["questions"].values())
    held = sizes[-1]["timeline_bytes"]
    told = f"held {most / 1e9:.1f} GB at most, {held / 1e9:.1f} GB of them before the first question"
    assert told in text_of("analysis.md")
    took = results("analysis")["sizes"][-1]["questions"]["all of a report"]["wall_s"]
    assert f"took {min(took):.1f} to {max(took):.1f} s of the clock for 10 M spans" in text_of("analysis.md")
    for size in sizes:
        first = size["questions"]["waits"]
        assert size["timeline_bytes"] == first["process_peak_bytes"][0] - first["peak_bytes"][0]
    page = results("report")
    assert f"is {page['page']['bytes'] / 1e6:.1f} MB" in text_of("report.md")
    assert f"after {page['text_s']:.2f} s and its first figures after {page['first_s']:.1f} s" in text_of("report.md")


def test_what_the_gate_was_seen_to_do():
    told = text_of("gate.md")
    for device, name in (("cpu", "2 CPU cores"), ("nvidia-h200", "4 NVIDIA H200")):
        found = results("gate")["devices"][device]
        assert found["lossy_refused"] == 1000
        assert f"{found['launches']} launches on {name}" in told
        assert f"{found['alarms']} alarms in 1,000" in told


def test_what_the_gate_catches_and_when_it_is_wrong():
    def percent(share: float | None) -> str:
        return "" if share is None else f"{100 * share:.1f}".removesuffix(".0")

    told = (ROOT / "docs" / "gate.md").read_text()
    for row in results("gate_power")["rows"]:
        before, after = row["before"], row["after"]
        cells = [each[field] for field in ("regressed", "passed") for each in (before, after)]
        numbers = map(percent, [*cells, after["drift"], after["printed"]])
        assert f"| {row['case']} | {row['checks']:,} | {' | '.join(numbers)} |\n" in told


def test_reports_are_shown_as_they_are(command_line):
    printed = command_line("report", ROOT / "traces" / "h200x4_late_host").stdout
    told = [line for line in printed.splitlines() if line]
    for document in (ROOT / "README.md", ROOT / "docs" / "walkthrough.md"):
        (shown,) = (block for block in document.read_text().split("```text\n") if "waiting  38 %" in block)
        lines = [line for line in shown.split("```")[0].splitlines() if line and not line.startswith("$ ")]
        if lines[-1].strip() == "...":
            lines.pop()
        assert lines == told[: len(lines)]
        assert len(lines) >= 3


def test_what_the_demo_draws():
    """The demo's rows in the README: tokens, sent and received are the routing's."""
    from tracekern.moe.routing import draw_batch
    from tracekern.moe.shape import MoeShape

    shape = MoeShape(8, 64, 64, 6, 1, "bf16")
    tokens, received = [0] * 8, [0] * 8
    for rank, iteration in itertools.product(range(8), range(3)):
        batch = draw_batch(shape, seed=7, rank=rank, iteration=iteration, routing="zipf", uneven=True)
        tokens[rank] += batch.num_tokens
        for expert in batch.topk_idx.flatten().tolist():
            received[expert // 8] += expert >= 0
    rows = re.findall(
        r"^ +(\d) +(\d+) +[\d.]+ +(\d+) +(\d+) +[\d,]+ +\d+ %  equal", (ROOT / "README.md").read_text(), re.M
    )
    assert len(rows) == 3
    for row in rows:
        rank, *counts = map(int, row)
        assert counts == [tokens[rank], 6 * tokens[rank], received[rank]]


def test_the_questions_of_the_report_are_those_that_it_has():
    from tracekern.viewers.report.report_page import questions

    rows = re.findall(r"^\| (\w+) \| ([^|]+\?) \|", (ROOT / "docs" / "report.md").read_text(), re.MULTILINE)
    assert [(question.title, question.text) for question in questions()] == rows


def test_the_variants_of_all_families_are_told_with_the_number_of_their_kernels():
    from tracekern.moe.families import FAMILY_OF

    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", (ROOT / "docs" / "moe.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted((name, str(len(family.variants[name]))) for name, family in FAMILY_OF.items())


def test_reliability_says_what_the_attacks_found():
    found = results("reliability")
    kills, limits = found["kills"]["rows"], found["limits"]["rows"]
    rows = [cells[1:] for cells in table("reliability.md", "left and named")]
    assert rows[0] == [f"{found['damage']['cases']:,}", "", "1", "", str(found["damage"]["faults"])]
    wanted = [[kills[target]] for target in ("rank", "spawner", "launcher")] + [list(limits.values())]
    for cells, of_row in zip(rows[1:5], wanted, strict=True):
        assert cells == [
            str(sum(row["runs"] for row in of_row)),
            f"{max(row['longest_s'] for row in of_row)} s",
            *(str(combine(row[key] for row in of_row)) for key, combine in (("lines", max), ("left", sum))),
            str(sum(row["faults"] for row in of_row)),
        ]
    assert rows[5] == [str(found["strangers"]["passed"]), "", "", "", str(found["strangers"]["faults"])]
    assert day("reliability") in text_of("reliability.md")
    for outcome in ("read", "refused"):
        assert f"{found['damage'][outcome]:,} {outcome}" in text_of("reliability.md")


def test_how_right_costs_are():
    found, told = results("causes"), text_of("analysis.md")
    rows = found["cases"]
    between = [row for row in rows if "least_ratio" in row]
    single = [
        row
        for row in rows
        if "ratio" in row and row not in between and "hides" not in row["case"] and not row["case"].startswith("two ")
    ]
    ratios = [row["ratio"] for row in single]
    assert f"Of {len(rows)} cases" in told
    assert (
        f"of the {len(single)} with one cause cost / truth lies between {min(ratios):.2f} and {max(ratios):.2f}" in told
    )
    least = [row["least_ratio"] for row in between]
    assert f"of {len(between)} in which hosts run ahead" in told
    assert f"at least / truth lies between {min(least):.2f} and {max(least):.2f}" in told
    assert all(row["ratio"] > 0.95 for row in between)
    named = [sum(row[key] for row in rows) for key in ("right", "runs", "wrong")]
    assert "named right in {:,} of {:,} runs, something else as well in {}".format(*named) in told
    for entry, what in zip(found["chance"], ("with noise alone", "in which a clock jumps"), strict=True):
        assert f"{entry['named']} of {entry['runs']:,} {what}" in told
    assert day("causes") in told


def test_the_wait_that_is_followed_through_all_stages():
    """The parts of the longest wait, the gap that it leads back to, a peer's gap, and what the run saves."""
    findings = Findings(tracekern.load(ROOT / "traces" / "h200x4_late_host"))
    waits, spans, schedule = findings.waits, findings.timeline.spans, findings.graph.schedule
    longest = int(waits.wait_ns.argmax())
    first_ns = int(schedule.start[schedule.order].min())
    told = text_of("analysis.md").partition("One wait through all stages")[2].partition("## ")[0]
    begin, end = (int(times[waits.row[longest]]) - first_ns for times in (spans.start, spans.end))
    assert f"begins at {begin / 1e3:,.1f} us and ends at {end / 1e3:,.1f}" in told
    parts = [int(values[longest]) / 1e3 for values in (waits.late_ns, waits.drain_ns)]
    assert "{:.1f} us are `late_sender`, {:.1f} us `drain`".format(*parts) in told
    launches = findings.timeline.launches
    gap = {
        launches[row].rank: int(schedule.start[row] - schedule.end[schedule.before[row]]) / 1e3
        for row in schedule.order.tolist()
        if (launches[row].name, launches[row].sequence) == ("dispatch_send", 0)
    }
    assert f"gap before rank 0's kernel takes {gap[0]:,.2f} us" in told
    assert f"gap of rank 3 itself, {gap[3]:,.2f} us" in told
    assert f"same kernel of rank 1 is {gap[1]:,.1f} us" in told
    assert f"rank 0 would send {gap[0] - gap[1]:.1f} us earlier" in told
    (cause,) = findings.answer.causes
    assert f"its end would be {cause.saving.by_iteration[0] / 1e3:.0f} us earlier" in told
    assert f"{cause.saving.whole_ns / 1e6:.2f} of {findings.answer.makespan_ns / 1e6:.2f} ms" in told
