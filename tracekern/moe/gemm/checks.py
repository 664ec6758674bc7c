"""Checks of the tensors of a call of int4 experts. Each raises BadInput, in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekern.errors import BadInput
from tracekern.moe.experts import MAX_DETAIL
from tracekern.moe.gemm.blocks import BLOCK_CHANNELS, BLOCK_ROWS, PreparedWeights
from tracekern.moe.gemm.kernels import FACTS
from tracekern.moe.gemm.packing import DIVISOR, check_scales
from tracekern.moe.shape import MAX_EXPERTS, MAX_TOKENS, MAX_TOPK, check_range, describe_tensor

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16
"""Tensors begin at multiples of it: kernels move 16 bytes at a time."""
MAX_ROWS = 1 << 22
"""Rows of a call: the row field of the events holds less."""
MAX_SHARED_BYTES = 227 << 10
"""Shared memory of a block on an H100, which the CPU backend takes, too."""


def check(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, size: tuple[int, ...], like: torch.Tensor | None = None
) -> None:
    """Raises BadInput for another dtype, size or layout, or another device than that of `like`."""
    if tensor.dtype != dtype or tuple(tensor.shape) != size:
        raise BadInput(f"{name} is {describe_tensor(tensor)}; wanted {dtype} {list(size)}")
    if not tensor.is_contiguous():
        raise BadInput(f"{name} is not contiguous; wanted contiguous()")
    if like is not None and tensor.device != like.device:
        raise BadInput(f"{name} is on {tensor.device}, other tensors on {like.device}; wanted one device")
    if tensor.data_ptr() % ALIGNMENT:
        raise BadInput(f"{name} begins at an address that {ALIGNMENT} bytes do not divide; clone() it")


def check_device(tensor: torch.Tensor, channels: int) -> None:
    """Raises BadInput for a device without the instructions, or without room for x of that many channels."""
    import torch

    room = MAX_SHARED_BYTES
    if tensor.device.type == "cuda":
        facts = torch.cuda.get_device_properties(tensor.device)
        if facts.major < 8:
            raise BadInput(f"{facts.name} is sm_{facts.major}{facts.minor}; int4 experts need sm_80 or newer")
        room = facts.shared_memory_per_block_optin  # type: ignore[attr-defined]  # missing in torch's stub
    elif tensor.device.type != "cpu":
        raise BadInput(f"tensors are on {tensor.device}; wanted cpu or cuda")
    needed = FACTS.shared_bytes(channels)
    if needed > room:
        raise BadInput(f"{channels} channels need {needed} bytes of shared memory, there are {room}; take fewer")


def check_rows(name: str, rows: torch.Tensor) -> None:
    """Raises BadInput unless `rows` are [n, channels] bf16 that kernels can read."""
    import torch

    if rows.ndim != 2:
        raise BadInput(f"{name} is {describe_tensor(rows)}; wanted torch.bfloat16 [rows, channels]")
    check(name, rows, torch.bfloat16, tuple(rows.shape))
    check_size(f"channels of {name}", rows.shape[1])
    check_device(rows, rows.shape[1])


def check_size(name: str, size: int) -> None:
    """Raises BadInput for a hidden or intermediate size that tiles do not divide."""
    if size == 0 or size % DIVISOR:
        raise BadInput(f"{name} is {size}; wanted a multiple of {DIVISOR}")


def check_weights(name: str, weights: PreparedWeights, channels: int, rows: int, like: torch.Tensor) -> None:
    """Raises BadInput unless these are weights of so many channels and rows.

    Scales of packed words are looked at on the CPU only: on a GPU that would read all weights and synchronize the
    stream in every call. prepare_weights() has looked at the others.
    """
    import torch

    words = weights.words
    experts = words.shape[0] if words.ndim == 4 else -1
    size = (experts, channels // 64, rows, 2)
    if weights.is_permuted:
        size = (experts, channels // BLOCK_CHANNELS, rows // BLOCK_ROWS, 64)
    check(name, words, torch.int64, size, like)
    check_range(f"experts of {name}", experts, 1, MAX_EXPERTS)
    if words.device.type == "cpu" and not weights.is_permuted:
        check_scales(name, words)


def check_layer(w13: PreparedWeights, w2: PreparedWeights, hidden: int, like: torch.Tensor) -> int:
    """Returns the intermediate size. Raises BadInput unless both are weights of one layer, for one staging."""
    intermediate = w13.rows // 2
    check_size("intermediate", intermediate)
    check_device(like, max(hidden, intermediate))
    check_weights("w13", w13, hidden, 2 * intermediate, like)
    check_weights("w2", w2, intermediate, hidden, like)
    if w2.num_experts != w13.num_experts:
        raise BadInput(f"w13 has {w13.num_experts} experts, w2 {w2.num_experts}; wanted the same")
    if w2.staging != w13.staging:
        raise BadInput(f"w13 has staging {w13.staging!r}, w2 {w2.staging!r}; prepare_weights() both alike")
    return intermediate


def int32_choices(topk_ids: torch.Tensor, num_tokens: int, num_experts: int, like: torch.Tensor) -> torch.Tensor:
    """Returns choices [num_tokens, topk] as int32, as kernels read them; int32 ids are not copied.

    Raises BadInput for what is no tensor of choices, and on the CPU for one out of range. On a GPU it has no row.
    """
    import torch

    topk = topk_ids.shape[1] if topk_ids.ndim == 2 else -1
    if topk_ids.dtype not in (torch.int32, torch.int64) or tuple(topk_ids.shape) != (num_tokens, topk):
        raise BadInput(
            f"topk_ids is {describe_tensor(topk_ids)}; wanted torch.int32 or torch.int64 {[num_tokens, topk]}"
        )
    check_range("top-k", topk, 1, MAX_TOPK)
    check_range("tokens", num_tokens, 0, MAX_TOKENS)
    check_range("rows, tokens x top-k,", num_tokens * topk, 0, MAX_ROWS - 1)
    if topk_ids.device.type == "cpu":
        wrong = (topk_ids < -1) | (topk_ids >= num_experts)
        if wrong.any():
            token, choice = wrong.nonzero()[0].tolist()
            raise BadInput(
                f"topk_ids[{token}, {choice}] is expert {int(topk_ids[token, choice])}; "
                f"wanted -1 (none) or 0 to {num_experts - 1}"
            )
    if topk_ids.dtype == torch.int64:
        # Dropping the upper bits alone could turn a number out of range into that of an expert.
        topk_ids = topk_ids.clamp(-1, num_experts).int()
    check("topk_ids", topk_ids, torch.int32, (num_tokens, topk), like)
    return topk_ids


def check_eids(eids: torch.Tensor | None, num_experts: int, like: torch.Tensor) -> None:
    """Raises BadInput for a list of experts that are not there, or twice. On a GPU one out of range has no tiles."""
    import torch

    if eids is None:
        return
    check("eids", eids, torch.int32, (eids.numel(),), like)
    check_range("length of eids", eids.numel(), 1, num_experts)
    if eids.device.type == "cpu":
        if int(eids.min()) < 0 or int(eids.max()) >= num_experts:
            raise BadInput(f"eids has {eids.tolist()}; wanted 0 to {num_experts - 1}")
        if len(set(eids.tolist())) != eids.numel():
            raise BadInput(f"eids has {eids.tolist()}; wanted each expert once")


def check_offsets(off_e: torch.Tensor, num_experts: int, num_rows: int, like: torch.Tensor) -> None:
    """Raises BadInput unless OffE rises from 0 to at most the number of rows. Waits for the device."""
    import torch

    check("off_e", off_e, torch.int32, (num_experts + 1,), like)
    offsets = off_e.tolist()
    if offsets[0] != 0 or offsets[-1] > num_rows or any(a > b for a, b in zip(offsets, offsets[1:], strict=False)):
        raise BadInput(f"off_e does not rise from 0 to at most {num_rows} rows")


def check_abort(abort: torch.Tensor | None, like: torch.Tensor) -> None:
    """Raises BadInput unless `abort` is one int32."""
    import torch

    if abort is not None:
        check("abort", abort, torch.int32, (1,), like)


def check_inverse(inv: torch.Tensor, num_rows: int, like: torch.Tensor) -> None:
    """Raises BadInput unless `inv` is [num_tokens, topk] int32, of rows that are there. A GPU's are not looked at."""
    import torch

    num_tokens, topk = inv.shape if inv.ndim == 2 else (-1, -1)
    check("inv", inv, torch.int32, (num_tokens, topk), like)
    check_range("top-k", topk, 1, MAX_TOPK)
    if inv.device.type == "cpu" and inv.numel() and not -1 <= int(inv.min()) <= int(inv.max()) < num_rows:
        raise BadInput(f"inv has rows {int(inv.min())} to {int(inv.max())}; wanted -1 (none) or 0 to {num_rows - 1}")


def check_detail(detail: int) -> None:
    check_range("detail", detail, 0, MAX_DETAIL)
