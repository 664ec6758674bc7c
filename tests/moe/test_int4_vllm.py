"""The adapter for vLLM, against a stub of the classes that it touches, of the version that the adapter names."""

from __future__ import annotations

import enum
import inspect
import subprocess
import sys
from abc import ABC, abstractmethod
from types import ModuleType, SimpleNamespace

import pytest
import torch
from int4_experts import draw_rows

from tracekern.errors import BadInput
from tracekern.moe.gemm import PreparedWeights, fused_moe_apply, quantize, restore_weights

SIZE, EXPERTS, TOPK, TOKENS = 128, 4, 2, 5
BASE = "vllm.model_executor.layers.fused_moe.fused_moe_method_base"
ADAPTER = "tracekern.moe.gemm.vllm"


class FusedMoEMethodBase(ABC):
    """The stub: names and order of arguments, what is abstract, and what __init__ leaves."""

    def __init__(self, moe):
        self.moe = moe
        self.moe_quant_config = None
        self.moe_kernel = None

    @property
    def topk_indices_dtype(self):
        return None

    @abstractmethod
    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
    ): ...

    def process_weights_after_loading(self, layer):  # noqa: B027  # of QuantizeMethodBase, where it does nothing
        pass

    @abstractmethod
    def get_fused_moe_quant_config(self, layer): ...

    @abstractmethod
    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input): ...


class MoEActivation(enum.Enum):
    SILU = "silu"
    GELU = "gelu"


class RoutedExperts(torch.nn.Module):
    """The stub of a layer: it calls its method as vLLM does, with each argument by name."""

    def __init__(self, method, num_local=EXPERTS, expert_map=None, size=SIZE, dtype=torch.bfloat16, on_input=False):
        super().__init__()
        self.quant_method = method
        self.apply_router_weight_on_input = on_input
        self.register_buffer("expert_map", expert_map, persistent=False)
        method.create_weights(
            layer=self,
            num_experts=num_local,
            hidden_size=size,
            unpadded_hidden_size=size,
            intermediate_size_per_partition=size,
            params_dtype=dtype,
            weight_loader=print,
            global_num_experts=EXPERTS,
        )

    def forward_modular(self, x, topk_weights, topk_ids, shared_experts=None, shared_experts_input=None):
        return self.quant_method.apply(
            layer=self,
            x=x,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )


@pytest.fixture
def method_class(monkeypatch):
    """The adapter's class, imported where `vllm` is the stub."""
    parts = BASE.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    sys.modules[BASE].FusedMoEMethodBase = FusedMoEMethodBase
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    import tracekern.moe.gemm.vllm as adapter

    yield adapter.Int4SparseMoEMethod
    del sys.modules[ADAPTER]


def config(**changes):
    return SimpleNamespace(**({"activation": MoEActivation.SILU, "has_bias": False, "swiglu_limit": None} | changes))


def draw():
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn((EXPERTS, 2 * SIZE, SIZE), generator=generator).bfloat16() / SIZE**0.5
    w2 = torch.randn((EXPERTS, SIZE, SIZE), generator=generator).bfloat16() / SIZE**0.5
    ids = torch.rand((TOKENS, EXPERTS), generator=generator).argsort(dim=1)[:, :TOPK].int().contiguous()
    return draw_rows(TOKENS, SIZE), ids, torch.rand((TOKENS, TOPK), generator=generator), w13, w2


def load(layer, w13, w2):
    """What vLLM does: the checkpoint into parameters, then the method's turn."""
    layer.w13_weight.data.copy_(w13)
    layer.w2_weight.data.copy_(w2)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def test_arguments_have_the_names_of_vllm(method_class):
    for name in ("create_weights", "process_weights_after_loading", "get_fused_moe_quant_config", "apply"):
        mine, theirs = (
            [(one.name, one.kind) for one in inspect.signature(getattr(owner, name)).parameters.values()]
            for owner in (method_class, FusedMoEMethodBase)
        )
        assert mine == theirs, name


def test_a_layer_has_the_bits_of_fused_moe_apply(method_class):
    x, ids, weights, w13, w2 = draw()
    layer = RoutedExperts(method_class(config()))
    assert layer.w13_weight.weight_loader is print
    assert layer.w13_weight.global_num_experts == EXPERTS
    load(layer, w13, w2)
    assert torch.equal(restore_weights(PreparedWeights(layer.w13_weight, layer.int4_staging)), quantize(w13))
    wanted = fused_moe_apply(x, ids, weights, quantize(w13), quantize(w2))
    for topk_ids in (ids, ids.long()):
        assert torch.equal(layer.forward_modular(x, weights, topk_ids), wanted)
    assert layer.quant_method.topk_indices_dtype == torch.int32
    assert layer.quant_method.get_fused_moe_quant_config(layer) is None
    assert sorted(name for name, _ in layer.named_parameters()) == ["w13_weight", "w2_weight"]


def test_ranks_compute_their_own_experts(method_class):
    x, ids, weights, w13, w2 = draw()
    ids[1, 0] = -1
    for local in ([0, 1], [1, 3]):
        expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        expert_map[local] = torch.arange(2, dtype=torch.int32)
        layer = load(RoutedExperts(method_class(config()), 2, expert_map), w13[local], w2[local])
        eids = torch.tensor(local, dtype=torch.int32)
        wanted = fused_moe_apply(x, ids, weights, quantize(w13), quantize(w2), eids=eids)
        for topk_ids in (ids, ids.long()):
            assert torch.equal(layer.forward_modular(x, weights, topk_ids), wanted)


@pytest.mark.parametrize(
    ("changes", "settings", "told"),
    [
        ({"activation": MoEActivation.GELU}, {}, "activation is gelu; int4 experts take silu"),
        ({"has_bias": True}, {}, "experts have biases"),
        ({"swiglu_limit": 7.0}, {}, "swiglu_limit is 7.0"),
        ({}, {"on_input": True}, "weights are applied to the input"),
        ({}, {"dtype": torch.float16}, "params_dtype is torch.float16; int4 experts take torch.bfloat16"),
        ({}, {"size": 192}, "hidden_size is 192; wanted a multiple of 128"),
    ],
)
def test_layers_that_it_does_not_compute_are_refused(method_class, changes, settings, told):
    with pytest.raises(BadInput, match=told) as error:
        RoutedExperts(method_class(config(**changes)), **settings)
    assert "\n" not in str(error.value)


def test_without_vllm_the_adapter_alone_is_missing():
    """In a process where `vllm` cannot be imported, whether it is installed or not."""
    code = f"""
import sys
sys.modules["vllm"] = None
import tracekern, tracekern.moe.gemm
from tracekern.errors import BadInput
try:
    import {ADAPTER}
except BadInput as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith("tracekern.moe.gemm.vllm needs vLLM with FusedMoEMethodBase (")
    assert done.stdout.endswith("); `python -m pip install vllm`\n")
    assert done.stdout.count("\n") == 1


def test_nothing_imports_vllm_by_itself():
    code = "import sys, tracekern.moe.gemm; sys.exit('vllm' in sys.modules or 'tracekern.moe.gemm.vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
