"""What benchmarks/int4_sparse.py measures: rows of experts, their weights in every form, and products ready to start.

A load is a number of tokens that each expert has, such as "8", or "zipf": the experts, in an order drawn anew, are
chosen with weights 1, 1/2^1.2, 1/3^1.2 and so on, 8 times as often as there are experts. Of 128 experts the hottest
then has 267 rows, 10 have more than 16, 107 fewer than 8, and 22 of these none; of 48 the hottest has 117, and 5 none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

DEVICE = "cuda"
HIDDEN, INTERMEDIATE = 7168, 2048
KERNELS = ("k2", "k4")
LOADS_OF_PINNED = ("1", "8", "64")
ZIPF, ZIPF_EXPONENT, ZIPF_MEAN, ZIPF_SEED = "zipf", 1.2, 8, 0


@dataclass(frozen=True)
class Load:
    name: str
    counts: list[int]
    """Rows of each expert."""

    @classmethod
    def of(cls, name: str, experts: int) -> Load:
        return cls(name, zipf_counts(experts) if name == ZIPF else [int(name)] * experts)


def zipf_counts(experts: int) -> list[int]:
    """Rows of each expert under the load "zipf"."""
    import numpy

    generator = numpy.random.default_rng(ZIPF_SEED)
    weights = 1 / numpy.arange(1, experts + 1) ** ZIPF_EXPONENT
    counts = generator.multinomial(ZIPF_MEAN * experts, generator.permutation(weights / weights.sum()))
    return [int(count) for count in counts]


def stagings_here() -> list[str]:
    """Those that this GPU has."""
    import torch

    from tracekern.moe.gemm import prepared
    from tracekern.moe.gemm.kernels import STAGINGS

    return [*prepared.stagings_of(torch.device(DEVICE, 0)), *STAGINGS]


class Weights:
    """The weights of one kernel: as words of the contract, prepared for each staging, and dense in bf16."""

    def __init__(self, kernel: str, experts: int, stagings: list[str]) -> None:
        import torch

        self.kernel, self.experts = kernel, experts
        self.channels, rows = (HIDDEN, 2 * INTERMEDIATE) if kernel == "k2" else (INTERMEDIATE, HIDDEN)
        # Every number and place, all with the scale 1/128.
        self.words = torch.randint(0, 1 << 48, (experts, self.channels // 64, rows, 2), device=DEVICE)
        self.words.bitwise_or_(0x3C00 << 48)
        self.of_staging: dict[str, Any] = {}
        self.refused: list[str] = []
        """Stagings whose bits prepare_weights() itself has found to be others: it gives words of `direct` for them."""
        for staging in stagings:
            prepared = self._prepared(staging)
            if prepared.staging == staging:
                self.of_staging[staging] = prepared.words
            else:
                self.refused.append(staging)
        self.dense = torch.empty((experts, rows, self.channels), dtype=torch.bfloat16, device=DEVICE).normal_()

    def _prepared(self, staging: str) -> Any:
        from tracekern.moe.gemm import PreparedWeights, prepare_weights
        from tracekern.moe.gemm.kernels import STAGINGS

        if staging in STAGINGS:
            return PreparedWeights(self.words, staging)
        return prepare_weights(self.words, staging=staging)


class Product:
    """K2 or K4 of one load with one staging, its tiles laid out."""

    def __init__(self, weights: Weights, staging: str, load: Load, rows: Any, offsets: Any) -> None:
        import torch

        from tracekern.moe.gemm.kernels import Sizes, product_stages, tile_tensors

        experts, num_rows = weights.experts, sum(load.counts)
        self.staging = staging
        self.stages = product_stages(weights.kernel, staging, max(load.counts))
        self.sizes = Sizes(
            num_experts=experts, num_listed=experts, hidden=HIDDEN, intermediate=INTERMEDIATE, num_rows=num_rows
        )
        outputs = INTERMEDIATE if weights.kernel == "k2" else HIDDEN
        self.result = torch.empty((num_rows, outputs), dtype=torch.bfloat16, device=DEVICE)
        names = ("w13", "x_rows", "middle_rows") if weights.kernel == "k2" else ("w2", "middle_rows", "result_rows")
        self.tensors = dict(zip(names, (weights.of_staging[staging], rows, self.result), strict=True))
        self.tensors |= {"expert_offset": offsets, **tile_tensors(staging, experts, num_rows, offsets)}
        self._launch(("tiles",), None)

    def _launch(self, stages: tuple[str, ...], session: Any) -> None:
        from tracekern.moe.gemm.kernels import launch

        device = self.result.device
        launch(stages, self.sizes, self.tensors, device=device, staging=self.staging, capture=session)

    def start(self, session: Any = None) -> None:
        self._launch(self.stages, session)

    def record_steps(self, detail: int) -> None:
        """Has captures get the steps of every so many-th tile; 0: of none."""
        self.sizes = replace(self.sizes, detail=detail)

    def bits(self) -> Any:
        """The result of one launch, where it wrote none all bits set."""
        import torch

        self.result.view(torch.int16).fill_(-1)
        self.start()
        return self.result.view(torch.int16)


class Case:
    """All that runs in turns for one kernel and one load."""

    def __init__(self, weights: Weights, load: Load) -> None:
        import torch

        self.weights, self.load = weights, load
        self.rows = torch.randn((sum(load.counts), weights.channels), dtype=torch.bfloat16, device=DEVICE)
        ends = torch.tensor([0, *load.counts], device=DEVICE).cumsum(0)
        self.offsets = ends.to(torch.int32)
        self.products = {
            staging: Product(weights, staging, load, self.rows, self.offsets)
            for staging in weights.of_staging
            if staging != "pinned" or load.name in LOADS_OF_PINNED
        }

    def differing(self) -> list[str]:
        """The stagings whose results are not those of `direct`, bit by bit."""
        import torch

        wanted = self.products["direct"].bits()
        return [name for name, product in self.products.items() if not torch.equal(product.bits(), wanted)]

    def grouped_mm(self) -> tuple[Callable[[], object] | None, str]:
        """The same product of dense bf16 weights by torch, gate and up in one without silu; or None, and why."""
        import torch

        dense, ends = self.weights.dense.transpose(1, 2), self.offsets[1:].clone()

        def start() -> object:
            return torch._grouped_mm(self.rows, dense, offs=ends)

        try:
            start()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
        except (AttributeError, RuntimeError) as error:
            return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return start, ""
