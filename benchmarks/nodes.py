"""Across hosts: what a proxy takes for a put, against libfabric alone, and whole low latency calls over a network.

    python benchmarks/nodes.py [--pairs 7] [--providers tcp shm] [--rehearse efa] [--tokens 1 8 32 128]

Two processes, each pinned to a core of its own. fabric_raw.cpp posts writes with immediates and polls, in one thread;
fabric_proxy.cpp asks for the same in a ring of commands, in the thread that then runs the proxy. Both ask for
FI_DELIVERY_COMPLETE and keep as many writes under way. They take turns; a ratio is of runs that follow each other, and
what stands in the table is the median of these, with the smallest and the largest.

A whole call is one of `tracekern run moe --transport fabric` on two ranks of this host, recorded and not, in turns;
beside it what its bytes take over the same network at the rate that the raw writes had. --rehearse efa adds puts over a
tcp with EFA's rules (tests/cpp/efa_rules.cpp). EFA and verbs are not here: their rows say what is to be run where they
are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from fabric import REHEARSED, Case, compile_program, find_networks, run
from harness import Table, about_network, write_results

MESSAGE_BYTES = 8192
"""A message of 7,168 values of fp8 has 7,408; the memory that is cycled through has to divide by it."""
CASES = (
    Case("message", "paged", MESSAGE_BYTES, 16 * 1024, 64, 1.15),
    Case("8 bytes", "small", 8, 128 * 1024, 64, 1.30),
)
ROW_BYTES = 2 * 7168
NOT_HERE = ("efa", "verbs;ofi_rxm")
EXPERTS, TOPK, CALLS = 8, 4, 5
LIMIT_S = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--providers", nargs="+", default=["tcp", "shm"])
    parser.add_argument("--rehearse", nargs="+", default=[], choices=REHEARSED)
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 8, 32, 128])
    options = parser.parse_args()
    from tracekern.errors import NotBuilt
    from tracekern.fabric.library import native

    try:
        networks = find_networks(options.providers, options.rehearse)
    except NotBuilt as error:
        print(f"nodes: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        programs = {name: compile_program(Path(folder), name) for name in ("raw", "proxy")}
        puts = [measure_puts(programs, network, case, options.pairs) for network in networks for case in CASES]
    print_puts(puts)
    rates = {row["provider"]: row["raw_us"] for row in puts if row["bytes"] == MESSAGE_BYTES and row["status"] == "run"}
    calls = [measure_calls(name, tokens, rates[name]) for name in options.providers for tokens in options.tokens]
    print_calls(calls)
    about = {"libfabric": native().library_version(networks[0].real_library), "pairs": options.pairs}
    missing = [about_network(name, "not run") for name in NOT_HERE if name not in options.providers]
    write_results("nodes", {**about, "puts": puts + missing, "calls": calls})
    return 0


def measure_puts(programs: dict[str, list[str]], network: Any, case: Case, pairs: int) -> dict[str, Any]:
    """Returns the times of both programs, which take turns in alternate order, and their ratios."""
    found: dict[str, list[float]] = {name: [] for name in programs}
    for pair in range(pairs):
        for name in sorted(programs, reverse=pair % 2 == 0):
            found[name].append(case.bytes / 1e3 / run(programs[name], network, case))
    ratios = [proxy / raw for proxy, raw in zip(found["proxy"], found["raw"], strict=True)]
    return {
        **about_network(network.name, network.status),
        "case": case.name,
        "bytes": case.bytes,
        "raw_us": statistics.median(found["raw"]),
        "proxy_us": statistics.median(found["proxy"]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "goal": case.goal,
    }


def measure_calls(provider: str, tokens: int, message_us: float) -> dict[str, Any]:
    """Returns the time of calls between two ranks, each a host of its own, and what recording them costs."""
    found: dict[str, list[float]] = {"untraced": [], "traced": []}
    for turn in range(3):
        for name in sorted(found, reverse=turn % 2 == 0):
            found[name].append(run_calls(provider, tokens, name == "traced"))
    ratios = [traced / untraced for traced, untraced in zip(found["traced"], found["untraced"], strict=True)]
    # Half of a rank's choices are the other one's, on average: a message there, and a row back.
    wire_us = tokens * TOPK / 2 * message_us * (MESSAGE_BYTES + ROW_BYTES) / MESSAGE_BYTES
    return {
        **about_network(provider, "run"),
        "tokens": tokens,
        "call_ms": statistics.median(found["untraced"]),
        "wire_ms": wire_us / 1e3,
        "traced": statistics.median(ratios),
        "traced_ratios": ratios,
    }


def run_calls(provider: str, tokens: int, is_traced: bool) -> float:
    """Returns the median of the calls' times on the slower rank, in ms."""
    with tempfile.TemporaryDirectory() as folder:
        output = ["-o", f"{folder}/capture"] if is_traced else ["--no-trace"]
        numbers = f"--ranks 2 --tokens {tokens} --hidden 7168 --experts {EXPERTS} --topk {TOPK} --iterations {CALLS}"
        hosts = "--variant low_latency --backend cpu --nodes 2 --transport fabric --routing uniform --even --json"
        command = [sys.executable, "-m", "tracekern", "run", "moe", *numbers.split(), *hosts.split(), *output]
        env = {**os.environ, "TRACEKERN_NET": provider}
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=env)
        if done.returncode != 0:
            raise SystemExit(f"nodes: {tokens} tokens over {provider}: {done.stderr.strip()}; run it again")
        (found,) = json.loads(done.stdout)["runs"]
    return max(statistics.median(rank["iteration_ms"]) for rank in found["ranks"])


def print_puts(rows: list[dict[str, Any]]) -> None:
    columns = ["provider", "", "put", "raw us", "proxy us", "proxy / raw", "least..most", "goal", "", "commands/s"]
    table = Table(f"a put by a proxy and by libfabric alone, interleaved, on {os.cpu_count()} cores", columns)
    for row in rows:
        table.add(
            row["provider"],
            row["status"],
            row["case"],
            f"{row['raw_us']:.2f}",
            f"{row['proxy_us']:.2f}",
            f"{row['ratio']:.2f}",
            f"{min(row['ratios']):.2f}..{max(row['ratios']):.2f}",
            f"<= {row['goal']:.2f}",
            "" if row["ratio"] <= row["goal"] else "missed",
            f"{1e6 / row['proxy_us']:,.0f}",
        )
    table.print()
    for name in NOT_HERE:
        if name not in {row["provider"] for row in rows if row["status"] == "run"}:
            print(f"{name}: not run; TRACEKERN_NET='{name}' python benchmarks/nodes.py --providers '{name}'")


def print_calls(rows: list[dict[str, Any]]) -> None:
    columns = ["provider", "tokens", "call ms", "its bytes ms", "traced", "least..most"]
    table = Table(f"low latency calls of two ranks with a network in between, {EXPERTS} experts, top-{TOPK}", columns)
    for row in rows:
        table.add(
            row["provider"],
            str(row["tokens"]),
            f"{row['call_ms']:.2f}",
            f"{row['wire_ms']:.2f}",
            f"{row['traced']:.2f}",
            f"{min(row['traced_ratios']):.2f}..{max(row['traced_ratios']):.2f}",
        )
    table.print()


if __name__ == "__main__":
    sys.exit(main())
