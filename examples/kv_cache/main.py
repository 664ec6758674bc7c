"""A KV cache for disaggregated inference: prefillers write it to a decoder's pages, layer by layer.

    python examples/kv_cache/main.py [--provider tcp|shm] [-o kv-capture]
    tracekern report kv-capture

Every byte of every cache is checked. Exits with 0 where all are right, with 1 where not.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import secrets
import shlex
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import tracekern
from examples.kv_cache.decoder import Decoder
from examples.kv_cache.prefiller import Prefiller
from examples.kv_cache.protocol import Layout
from tracekern.fabric import DomainAddress, Net, TransferEngine

LAYOUT = Layout(layers=6, page_bytes=1 << 14, pool_pages=64, tail_bytes=1 << 13)
MAX_PAGES, LIMIT_S = 16, 2.0
NETS = {"tcp": Net("tcp", "127.0.0.1"), "shm": Net("shm", "")}


def make_engine(net: Net) -> TransferEngine:
    return TransferEngine.builder().add_domains([net]).transfer_limit(LIMIT_S).build()


@dataclass(frozen=True)
class Given:
    """What the prefillers of a run have in common."""

    provider: str = "tcp"
    world: int = 2
    run_id: str = ""
    output: str = ""
    layer_s: float = 0.0
    device: str = "cpu"


def be_prefiller(pipe: Connection, given: Given, rank: int) -> None:
    """A prefiller's process: tells where it is, and serves until the pipe ends."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(given.world), TRACEKERN_RUN_ID=given.run_id)
    engine = make_engine(NETS[given.provider])
    prefiller = Prefiller(engine, LAYOUT, MAX_PAGES, given.layer_s, given.device)
    pipe.send((str(engine.main_address), prefiller.pulse))
    with contextlib.suppress(EOFError), contextlib.ExitStack() as recording:
        while (request := pipe.recv()) != "stop":
            if request == "record":
                record(recording, engine, given.output)
            else:
                recording.close()
            pipe.send("done")
    prefiller.stop()


def record(recording: contextlib.ExitStack, engine: TransferEngine, output: str) -> None:
    command = shlex.join(["examples/kv_cache/main.py", *sys.argv[1:]])
    settings = {"provider": engine.nets[0].provider}
    opened = tracekern.capture(output, device="cpu", settings=settings, command=command)
    recording.enter_context(engine.traced(recording.enter_context(opened), 1 << 13))


def run(given: Given, requests: int) -> int:
    """Returns how many bytes were wrong."""
    context, prefillers, wrong, pipes = multiprocessing.get_context("spawn"), given.world - 1, 0, []
    os.environ.update(RANK="0", WORLD_SIZE=str(given.world), TRACEKERN_RUN_ID=given.run_id)
    decoder = Decoder(make_engine(NETS[given.provider]), LAYOUT)
    for rank in range(1, given.world):
        here, there = context.Pipe()
        context.Process(target=be_prefiller, args=(there, given, rank), daemon=True).start()
        there.close()
        pipes.append(here)
    links = []
    for rank, pipe in enumerate(pipes, 1):
        address, pulse = pipe.recv()
        links.append(decoder.add_prefiller(f"prefiller {rank}", DomainAddress.from_text(address), pulse))

    def fetch(number: int) -> int:
        link = links[number % prefillers]
        with decoder.fetch(link, number, MAX_PAGES, 10.0) as cache:
            found = cache.wrong_bytes(number)
        print(f"request {number}: {MAX_PAGES} pages of {LAYOUT.layers} layers from {link.name}, {found} bytes wrong")
        return found

    with contextlib.ExitStack() as recording, ThreadPoolExecutor(3) as pool:
        wrong += sum(pool.map(fetch, range(prefillers)))  # peers meet
        if given.output:
            tell(pipes, "record", lambda: record(recording, decoder.engine, given.output))
        wrong += sum(pool.map(fetch, range(prefillers, prefillers + requests)))
        if given.output:
            tell(pipes, "close", recording.close)
    for pipe in pipes:
        pipe.send("stop")
    decoder.stop()
    return wrong


def tell(pipes: list[Connection], what: str, here: Callable[[], None]) -> None:
    """All ranks open a capture together, and close it together."""
    for pipe in pipes:
        pipe.send(what)
    here()
    for pipe in pipes:
        pipe.recv()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", choices=sorted(NETS), default="tcp")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--prefillers", type=int, default=1)
    parser.add_argument("--layer-ms", type=float, default=2.0, help="time that a layer takes at least, on the CPU")
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if has_gpu else "cpu", help="of the layers")
    parser.add_argument("-o", "--output", default="", help="record a capture")
    asked = parser.parse_args()
    run_id = f"{os.getpid()}-{secrets.token_hex(4)}"
    how = asked.output, asked.layer_ms / 1e3, asked.device
    wrong = run(Given(asked.provider, asked.prefillers + 1, run_id, *how), asked.requests)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
