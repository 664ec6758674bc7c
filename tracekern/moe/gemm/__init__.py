"""A layer of int4 experts on one device, every step on record: see docs/int4_sparse.md for the contract it keeps."""

from __future__ import annotations

from tracekern.moe.gemm.apply import fused_moe_apply
from tracekern.moe.gemm.blocks import PreparedWeights, restore_weights
from tracekern.moe.gemm.experts import EXPERTS
from tracekern.moe.gemm.packing import pack_w2, pack_w13, quantize, unpack
from tracekern.moe.gemm.prepared import prepare_weights
from tracekern.moe.gemm.steps import k2, k4, permute, router, unpermute

__all__ = [
    "EXPERTS",
    "PreparedWeights",
    "fused_moe_apply",
    "k2",
    "k4",
    "pack_w2",
    "pack_w13",
    "permute",
    "prepare_weights",
    "quantize",
    "restore_weights",
    "router",
    "unpack",
    "unpermute",
]
