"""Prepares packed weights for the faster kernels of a device, once."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING

from tracekern.errors import BadInput
from tracekern.moe.gemm import checks
from tracekern.moe.gemm.blocks import PreparedWeights, permuted
from tracekern.moe.gemm.kernels import PREPARED_STAGINGS, STAGINGS
from tracekern.moe.gemm.packing import check_scales
from tracekern.moe.gemm.steps import k2, k4

if TYPE_CHECKING:
    import torch

_CHECKED_SIZE = 256
_CHECKED_ROWS = (1, 9, 0, 20, 70)
"""How many rows each expert has in the check of a device: they make tiles of every width."""


def prepare_weights(words: torch.Tensor, staging: str | None = None) -> PreparedWeights:
    """Permutes packed weights [num_experts, channels / 64, rows, 2] int64 for the faster kernels, on their device.

    Not one bit is lost: restore_weights() returns the words. words: from quantize(), pack_w13() or pack_w2(). staging:
    "wide" for GPUs of compute capability 9.0, "ring" from 9.0 on and for the CPU, "reg" from 8.0 on and for the CPU;
    None: the first of them that the device takes. A GPU whose multiplications turn out to differ is warned of, and gets
    the words as they are, for staging "direct"; so does one of AMD, without a warning. Raises BadInput, also for scales
    that are NaN or infinite.
    """
    if staging is not None and staging not in PREPARED_STAGINGS:
        raise BadInput(f"staging is {staging!r}; weights are prepared for one of {', '.join(PREPARED_STAGINGS)}")
    plain = PreparedWeights(words, STAGINGS[0])
    checks.check_weights("words", plain, plain.channels, plain.rows, words)
    checks.check_size("channels", plain.channels)
    checks.check_size("rows", plain.rows)
    checks.check_device(words, plain.channels)
    suitable = stagings_of(words.device)
    if staging is not None and staging not in suitable:
        raise BadInput(f"staging is {staging!r}; {words.device} takes {', '.join(suitable) or 'packed words alone'}")
    if not suitable:
        return plain
    staging = staging or suitable[0]
    if words.device.type == "cuda":
        check_scales("words", words)
        if not _takes_unordered(words.device, staging):
            return plain
    return PreparedWeights(permuted(words), staging)


def stagings_of(device: torch.device) -> tuple[str, ...]:
    """Returns what a device can run of PREPARED_STAGINGS, the fastest first: the CPU, a GPU from sm_80 on; HIP none."""
    import torch

    if device.type == "cpu":
        return ("ring", "wide", "reg")
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip:
        return ()
    if capability < (9, 0):
        return ("reg",)
    return PREPARED_STAGINGS if capability == (9, 0) else ("ring", "reg")


@functools.cache
def _takes_unordered(device: torch.device, staging: str) -> bool:
    """Returns whether K2 and K4 have the bits of "direct" on this GPU, and warns if not.

    Prepared weights hold the places as unordered metadata, "direct" gives the multiplication ordered ones.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    size, num_experts = _CHECKED_SIZE, len(_CHECKED_ROWS)
    rows = torch.randn((sum(_CHECKED_ROWS), size), generator=generator).bfloat16().to(device)
    off_e = torch.tensor([0, *_CHECKED_ROWS]).cumsum(0).int().to(device)
    scale = int(torch.tensor(2.0**-5).bfloat16().view(torch.int16)) << 48
    for kernel, outputs in ((k2, 2 * size), (k4, size)):
        drawn = torch.randint(0, 1 << 48, (num_experts, size // 64, outputs, 2), generator=generator)
        words = (drawn | scale).to(device)
        wanted, got = kernel(rows, off_e, words), kernel(rows, off_e, PreparedWeights(permuted(words), staging))
        if not torch.equal(wanted.view(torch.int16), got.view(torch.int16)):
            name = torch.cuda.get_device_name(device)
            text = f"{name}: kernels with staging {staging} and direct differ; int4 experts run with direct, slower"
            warnings.warn(text, stacklevel=3)
            return False
    return True
