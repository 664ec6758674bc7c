"""The options of `tracekern run moe`, checked as they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tracekern.comm.communicator import check_link_rate
from tracekern.comm.ranks.group import MAX_HEAP_RANKS
from tracekern.errors import BadInput
from tracekern.formatting import count
from tracekern.launcher.workload import flag
from tracekern.moe.experts import MAX_DETAIL, Experts
from tracekern.moe.families import EXPERT_KINDS, FAMILY_OF, VARIANTS, all_options, takes_option
from tracekern.moe.family import blocks_by_stage
from tracekern.moe.routing import ROUTINGS
from tracekern.moe.shape import MAX_EXPERTS, MAX_TOKENS, MoeShape, check_range
from tracekern.record.selection import Detail


class UnsuitableShape(BadInput):
    """The shape is one that the variant does not take, and others may."""


@dataclass(frozen=True)
class MoeRun:
    """One run: `iterations` calls of a variant on `ranks` ranks, each checked bit by bit.

    Raises BadInput for values that cannot be used.
    """

    ranks: int = flag(8, "Ranks: on a GPU each, all on one, or simulated on the CPU.")
    variant: str = flag("balanced", f"{', '.join(VARIANTS)}; all: one after the other.")
    tokens: int = flag(64, "Most tokens of a rank.")
    hidden: int = flag(2048, "Elements of a token.")
    experts: int = flag(64, "Experts of all ranks together.")
    topk: int = flag(6, "Experts that each token goes to.")
    dtype: str = flag("bf16", "fp32, fp16 or bf16.")
    expert: str = flag("scale", "What experts do: scale rows, or int4_sparse, a network.")
    intermediate: int = flag(256, "Size between the two weights of an int4 expert.")
    routing: str = flag("zipf", "uniform, zipf or one-hot-rank.")
    uneven: bool = flag(True, "Let ranks differ in their number of tokens.", "--uneven/--even")
    iterations: int = flag(3, "Calls, back to back.")
    seed: int = flag(7, "Seed of tokens, routing and simulated clocks.")
    trace: bool = flag(True, "Record, or run the untraced kernels.", "--trace/--no-trace")
    timeout_ms: int = flag(20_000, "Longest wait of a kernel for a peer.")
    records_per_track: int | Literal["auto"] = flag("auto", "Room of a track; auto counts first.", kind=str)
    keep: Literal["first", "last"] = flag("first", "Which records of a full track stay: first or last.", kind=str)
    clock: Literal["realtime", "cycles"] = flag(
        "realtime", "Clock of records: realtime, or cycles for short spans.", kind=str
    )
    detail: int | str = flag(
        0,
        "Record each step of every Nth tile of int4 experts; 0: of none. "
        "all: of every one, and how warps with nothing to do wait for the others. "
        "peers: record no waits for warps of the own block, which costs small calls less.",
        kind=str,
        metavar="N|all|peers",
    )
    every: int = flag(1, "Record every Nth launch of a kernel.")
    blocks: int = flag(
        0,
        "Blocks of all kernels, or of some, as combine=304; 0: 4 on the CPU, on a GPU most of its SMs.",
        kind=str,
        metavar="N[,KERNEL=N]",
    )
    stage_blocks: dict[str, int] = field(default_factory=dict)
    """Blocks of kernels that have another number of them, by the names of blocks_by_stage()."""
    sweep_blocks: bool = flag(
        False,
        "Time calls with other numbers of blocks, kernel by kernel, and print a table; makes no capture.",
        "--sweep-blocks",
    )
    warps: int = flag(0, "Warps of a block; 0: 4 on the CPU, 16 on a GPU.")
    family_options: dict[str, int] = field(default_factory=dict)
    """Options that only the variant's family has, such as the partitions of `pipelined`; 0 leaves the choice to it."""
    late_rank: int = flag(-1, "A rank whose calls begin late; -1: none.")
    late_us: int = flag(300, "How much later they begin.")
    late_proxy: int = flag(
        -1, "With --transport fabric: a rank whose proxy pauses for --late-us before each turn; -1: none."
    )
    slow_link: float | None = flag(
        None, "On the CPU: GB/s at which rows leave each rank for ranks of other nodes; see --nodes.", metavar="GBPS"
    )
    transport: Literal["memory", "fabric"] = flag(
        "memory", "How low_latency reaches ranks of other --nodes: memory of one host, or fabric, a network.", kind=str
    )
    link_nodes: int = 0
    """Nodes that the slow link or the network is between, for variants that know of none; 0: two."""
    torch_profiler: bool = flag(False, "Add torch.profiler's lanes: threads and, on GPUs, streams.", "--torch-profiler")
    host_driven: bool | None = flag(
        None,
        "Start each call after the last one has ended, as a host does that looks at results; or all back to back, "
        "each behind a barrier on the device. Without either: --device-driven on GPUs.",
        "--host-driven/--device-driven",
    )
    backend: str = flag("auto", "cpu, cuda, or auto: on GPUs if the ranks have room there.")
    limit_s: int = flag(60, "Seconds without progress in any phase that end the run.")
    command: str = "tracekern run moe"
    """Command line stored with the capture."""

    def __post_init__(self) -> None:
        for name, choice, wanted in (
            ("variant", self.variant, VARIANTS),
            ("routing", self.routing, ROUTINGS),
            ("expert", self.expert, tuple(EXPERT_KINDS)),
            ("backend", self.backend, ("auto", "cpu", "cuda")),
            ("keep", self.keep, ("first", "last")),
            ("clock", self.clock, ("realtime", "cycles")),
            ("transport", self.transport, ("memory", "fabric")),
        ):
            if choice not in wanted:
                raise BadInput(f"{name} is {choice!r}; wanted one of {', '.join(wanted)}")
        if self.backend == "cuda" and self.variant not in FAMILY_OF:
            raise BadInput(f"variant {self.variant} runs on the CPU only; on GPUs take one of {', '.join(FAMILY_OF)}")
        for name, value, low, high in (
            ("ranks", self.ranks, 1, MAX_HEAP_RANKS),
            ("tokens", self.tokens, 1, MAX_TOKENS),
            ("experts", self.experts, 1, MAX_EXPERTS),
            ("iterations", self.iterations, 1, 1_000_000),
            ("intermediate", self.intermediate, 1, 1 << 20),
            ("seed", self.seed, 0, (1 << 63) - 1),
            ("timeout-ms", self.timeout_ms, 1, 3_600_000),
            ("detail", self.tile_detail, 0, MAX_DETAIL),
            ("every", self.every, 1, 1_000_000),
            ("blocks", self.blocks, 0, 1024),
            ("warps", self.warps, 0, 32),
            ("limit-s", self.limit_s, 1, 1_000_000),
            ("late-rank", self.late_rank, -1, self.ranks - 1),
            ("late-us", self.late_us, 0, 1_000_000),
            ("late-proxy", self.late_proxy, -1, self.ranks - 1),
        ):
            check_range(name, value, low, high)
        if self.host_driven is False and self.variant not in FAMILY_OF:
            raise BadInput(f"device-driven: variant {self.variant} has no kernels to queue; leave it out")
        if self.late_rank >= 0 and self.variant not in FAMILY_OF:
            raise BadInput(f"late-rank is {self.late_rank}; variant {self.variant} has no kernels that could be late")
        check_family_options(self.variant, self.family_options)
        if self.variant in FAMILY_OF and (
            why := FAMILY_OF[self.variant].why_unsuitable(self.shape, self.family_options)
        ):
            raise UnsuitableShape(why)
        self._check_transport()
        self._check_slow_link()
        self._check_stage_blocks()
        if self.detail not in (0, "all", "peers") and not self.has_int4_experts:
            raise BadInput(f"detail is {self.detail}; expert {self.expert} has no steps, int4_sparse has")
        if self.clock == "cycles" and self.keep == "last":
            raise BadInput("clock is cycles; a flight recorder, keep last, has the realtime clock alone")
        kernels = {name: family.variants[name] for name, family in FAMILY_OF.items()}
        kind = EXPERT_KINDS[self.expert]
        if why := kind.why_unsuitable(self.variant, kernels, self.shape, self.intermediate):
            raise UnsuitableShape(why)
        records = self.records_per_track
        if records != "auto" and (not isinstance(records, int) or not 1 <= records <= 1 << 24):
            raise BadInput(f"records-per-track is {records}; wanted auto or 1 to {1 << 24}")
        _ = self.shape

    def _check_slow_link(self) -> None:
        if self.slow_link is None:
            return
        check_link_rate("slow-link", self.slow_link)
        if self.backend == "cuda":
            raise BadInput(f"slow-link is {self.slow_link:g} and backend cuda; only the CPU backend has such a link")
        if self.variant not in FAMILY_OF:
            raise UnsuitableShape(f"slow-link is {self.slow_link:g}; variant {self.variant} has no kernels that use it")
        nodes = self.num_link_nodes
        if self.ranks < 2 or (nodes and (nodes < 2 or self.ranks % nodes)):
            raise BadInput(
                f"nodes is {nodes}; for a slow link wanted 2 or more that divide {count(self.ranks, 'rank')}"
            )

    def _check_transport(self) -> None:
        if self.transport == "memory":
            if self.late_proxy >= 0:
                raise BadInput(f"late-proxy is {self.late_proxy} and transport memory; ranks have proxies with fabric")
            return
        if self.variant != "low_latency":
            raise UnsuitableShape(f"transport is fabric; variant {self.variant} has none, only low_latency")
        if self.slow_link is not None:
            raise BadInput(f"transport is fabric and slow-link {self.slow_link:g}; take one of them")
        if not 2 <= self.num_link_nodes <= self.ranks:
            raise BadInput(f"nodes is {self.num_link_nodes}; for a network wanted 2 to {self.ranks}, the ranks")

    @property
    def hosts(self) -> list[int] | None:
        """Returns of each rank the number of its host; None where all share memory."""
        if self.transport == "memory":
            return None
        return [rank * self.num_link_nodes // self.ranks for rank in range(self.ranks)]

    def _check_stage_blocks(self) -> None:
        if self.sweep_blocks and self.trace:
            raise BadInput("sweep-blocks times calls that are not recorded; wanted trace=False")
        if self.sweep_blocks and self.host_driven:
            raise BadInput("sweep-blocks times calls that are queued back to back; leave host-driven out")
        if not self.stage_blocks and not self.sweep_blocks:
            return
        for name, blocks in self.stage_blocks.items():
            check_range(f"blocks of {name}", blocks, 1, 1024)
        family = FAMILY_OF.get(self.variant)
        if family is None or not family.takes_stage_blocks:
            asked = f"blocks of {next(iter(self.stage_blocks))}:" if self.stage_blocks else "sweep-blocks is on;"
            raise UnsuitableShape(f"{asked} variant {self.variant} has no such choice")
        if self.sweep_blocks and self.variant in family.side_by_side:
            raise UnsuitableShape(
                f"sweep-blocks is on; kernels of variant {self.variant} run side by side, in no turns"
            )
        try:
            blocks_by_stage(family.variants[self.variant], self.stage_blocks)
        except BadInput as error:
            raise UnsuitableShape(str(error)) from None

    @property
    def shape(self) -> MoeShape:
        return MoeShape(self.ranks, self.tokens, self.experts, self.topk, self.hidden, self.dtype)

    @property
    def is_for_cpu(self) -> bool:
        """Whether the run is on the CPU backend, whatever GPUs there are."""
        return (
            self.backend == "cpu"
            or self.variant not in FAMILY_OF
            or self.slow_link is not None
            or (self.hosts is not None and self.backend != "cuda")
        )

    @property
    def num_link_nodes(self) -> int:
        """Nodes that a slow link or a network is between; 0: as many as the variant chooses, whose option they are."""
        if takes_option(self.variant, "nodes"):
            return self.family_options.get("nodes", 0)
        return self.link_nodes or 2

    @property
    def compiled_parts(self) -> list[str]:
        """Returns the names of the compiled parts that the run uses."""
        family = [FAMILY_OF[self.variant].name] if self.variant in FAMILY_OF else []
        return [name for name in (*family, EXPERT_KINDS[self.expert].compiled_part) if name]

    @property
    def has_int4_experts(self) -> bool:
        return self.expert == "int4_sparse"

    @property
    def tile_detail(self) -> int:
        """Returns N where the capture gets the steps of every Nth tile of int4 experts; 0: of none."""
        return self.detail if isinstance(self.detail, int) else int(self.detail == "all")

    @property
    def capture_detail(self) -> Detail:
        return "all" if self.detail == "all" else "peers" if self.detail == "peers" else "work"

    def draw_experts(self) -> Experts:
        """Returns the experts of all ranks."""
        return EXPERT_KINDS[self.expert].draw(self.shape, self.intermediate, self.tile_detail)

    @property
    def workload(self) -> dict[str, Any]:
        """Returns the settings for the capture: the options that determine the work of a call.

        The gate compares only runs with equal settings. Ranks, calls and grids are stored elsewhere in a capture; how
        it was run or recorded does not change the work. Options of a family belong here if the variant uses them.
        """
        names = ["variant", "tokens", "hidden", "experts", "topk", "dtype", "routing", "uneven", "seed"]
        settings = {name: getattr(self, name) for name in names}
        if self.has_int4_experts:
            settings |= {"expert": self.expert, "intermediate": self.intermediate}
        for name in ("late_rank", "late_proxy"):
            if getattr(self, name) >= 0:
                settings |= {name: getattr(self, name), "late_us": self.late_us}
        if self.slow_link is not None:
            settings |= {"slow_link": self.slow_link, "nodes": self.num_link_nodes}
            if not settings["nodes"]:
                del settings["nodes"]  # the kernels choose, and their table says it
        if self.hosts:
            settings |= {"transport": self.transport, "nodes": self.num_link_nodes}
        options = FAMILY_OF[self.variant].options_of(self.variant) if self.variant in FAMILY_OF else []
        chosen = {option.name: option.setting(self.family_options.get(option.name, 0)) for option in options}
        return settings | {name: value for name, value in chosen.items() if value}


def check_family_options(variant: str, options: dict[str, int]) -> None:
    """Raises BadInput for an option that the variant does not take, or for an invalid value."""
    for name, value in options.items():
        of_name = [option for option in all_options() if option.name == name]
        if not of_name:
            known = ", ".join(option.name for option in all_options())
            raise BadInput(f"option is {name!r}; wanted one of {known}")
        check_range(name, value, 0, of_name[0].high)
        if value and not takes_option(variant, name):
            takers = f"{' and '.join(of_name[0].variants)} {'has' if len(of_name[0].variants) == 1 else 'have'}"
            raise BadInput(f"{name} is {of_name[0].setting(value)}; variant {variant} has none, only {takers}")
