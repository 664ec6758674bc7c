"""int4 experts as a method of vLLM's MoE layers. Nothing else of tracekern imports this file, which imports vLLM.

It follows vLLM's main branch of 2026 at commit 02a0c2ce9103: a layer is RoutedExperts, its router has chosen experts
before, and `apply` gets their ids and weights, and shared experts. Earlier versions call `apply` with other arguments,
first with `router_logits`, later without shared experts; with those every call is a TypeError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tracekern.errors import BadInput
from tracekern.moe.gemm import checks
from tracekern.moe.gemm.apply import fused_moe_apply
from tracekern.moe.gemm.blocks import PreparedWeights
from tracekern.moe.gemm.packing import quantize
from tracekern.moe.gemm.prepared import prepare_weights

try:
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
except ImportError as error:
    raise BadInput(
        f"tracekern.moe.gemm.vllm needs vLLM with FusedMoEMethodBase ({error}); `python -m pip install vllm`"
    ) from error

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts


class Int4SparseMoEMethod(FusedMoEMethodBase):  # type: ignore[misc]  # Any where vLLM is not installed
    """Experts of a vLLM layer, quantized from its checkpoint when that is loaded, with fused_moe_apply().

    Have get_quant_method() of your QuantizationConfig return Int4SparseMoEMethod(layer.moe_config) for RoutedExperts.
    Layers are bf16 with gated silu. Raises BadInput for another activation, a limit of it, biases, router weights on
    the input, and sizes of a rank that 128 does not divide.
    """

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        """The dtype of ids that the router is asked for: of int64 ids each call would make a copy."""
        return torch.int32

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Gives the layer the parameters that vLLM loads a checkpoint into, of params_dtype.

        w13_weight: [num_experts, 2 * intermediate_size_per_partition, hidden_size], gate before up. w2_weight:
        [num_experts, hidden_size, intermediate_size_per_partition]. Raises BadInput.
        """
        self._check(layer, params_dtype)
        checks.check_size("hidden_size", hidden_size)
        checks.check_size("intermediate_size_per_partition", intermediate_size_per_partition)
        for name, rows, channels in (
            ("w13_weight", 2 * intermediate_size_per_partition, hidden_size),
            ("w2_weight", hidden_size, intermediate_size_per_partition),
        ):
            empty = torch.empty((num_experts, rows, channels), dtype=params_dtype)
            weight = torch.nn.Parameter(empty, requires_grad=False)
            for key, value in extra_weight_attrs.items():
                setattr(weight, key, value)
            layer.register_parameter(name, weight)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Quantizes w13_weight and w2_weight; they become the words of what prepare_weights() returns. Raises BadInput.

        The layer keeps their staging as int4_staging.
        """
        for name in ("w13_weight", "w2_weight"):
            prepared = prepare_weights(quantize(getattr(layer, name).data))
            setattr(layer, name, torch.nn.Parameter(prepared.words, requires_grad=False))
            layer.int4_staging = prepared.staging  # the same for both, which are on one device

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """Returns None: a config describes scales to kernels of vLLM, of which none runs."""
        return

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: SharedExperts | None,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Applies this rank's experts to x [num_tokens, hidden] bf16. Returns [num_tokens, hidden] bf16.

        topk_weights: fp32 [num_tokens, topk], which the router has renormalized where the model wants it. topk_ids:
        int32 or int64, of all ranks' experts; layer.expert_map says which are this rank's. vLLM adds up results of
        ranks, and it runs shared experts itself. Raises BadInput.
        """
        if layer.expert_map is not None:
            local = layer.expert_map[topk_ids.clamp(min=0).long()]
            topk_ids = local.masked_fill(topk_ids < 0, -1)
        w13, w2 = (PreparedWeights(words, layer.int4_staging) for words in (layer.w13_weight, layer.w2_weight))
        return fused_moe_apply(x, topk_ids, topk_weights, w13, w2)

    def _check(self, layer: RoutedExperts, params_dtype: torch.dtype) -> None:
        """Raises BadInput for layers that fused_moe_apply() does not compute."""
        if params_dtype != torch.bfloat16:
            raise BadInput(f"params_dtype is {params_dtype}; int4 experts take torch.bfloat16")
        if self.moe.activation.value != "silu":
            raise BadInput(f"activation is {self.moe.activation.value}; int4 experts take silu")
        if self.moe.has_bias:
            raise BadInput("experts have biases; int4 experts take none")
        if self.moe.swiglu_limit is not None:
            raise BadInput(f"swiglu_limit is {self.moe.swiglu_limit}; int4 experts take none")
        if layer.apply_router_weight_on_input:
            raise BadInput("the router's weights are applied to the input; int4 experts apply them to results")
