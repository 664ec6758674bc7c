"""The model: computes the cache of a prompt layer by layer, and adds 1 to a word after each."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import tracekern
from examples.kv_cache.protocol import Layout, first_word, steps


class _OfGpu:
    """Pinned memory of the host, as torch takes it for a tensor of the GPU."""

    def __init__(self, pinned: torch.Tensor) -> None:
        at = pinned.data_ptr(), False
        self.__cuda_array_interface__ = {"shape": tuple(pinned.shape), "typestr": "<i8", "data": at, "version": 2}


class Model:
    """In the caller's thread on the CPU; on a GPU as a CUDA graph, whose kernels write to pinned memory."""

    def __init__(self, layout: Layout, cache: torch.Tensor, word: torch.Tensor, layer_s: float, device: str) -> None:
        """layout: its pool_pages is the most that a prompt has. layer_s: what a layer takes at least, on the CPU."""
        self._layout, self._layer_s = layout, layer_s
        words = cache.view(torch.int64)
        if device == "cuda":
            words, word = (torch.as_tensor(_OfGpu(each), device=device) for each in (words, word))
        self._word = word
        num_pages = layout.layers * layout.pool_pages
        pages, tails = words.split([num_pages * layout.page_bytes // 8, layout.pool_pages * layout.tail_bytes // 8])
        self._pages, self._tail = pages.view(num_pages, -1), tails[: layout.tail_bytes // 8]
        self._page_steps, self._tail_steps = steps(layout.page_bytes).to(device), steps(layout.tail_bytes).to(device)
        self._firsts = torch.zeros(num_pages + 1, 1, dtype=torch.int64, device=device)
        self._graph = self._make_graph() if device == "cuda" else None

    def run(self, seed: int, goes_on: Callable[[], bool]) -> None:
        """Returns when all layers are computed; on the CPU also when it shall not go on."""
        layers, pool = self._layout.layers, self._layout.pool_pages
        firsts = [first_word(seed, layer, page) for layer in range(layers) for page in range(pool)]
        self._firsts.copy_(torch.tensor([*firsts, first_word(seed, layers, 0)]).unsqueeze(1))
        if self._graph is not None:
            with tracekern.range("graph of layers"):
                self._graph.replay()
                torch.cuda.current_stream().synchronize()
            return
        for layer in range(layers):
            if not goes_on():
                return
            with tracekern.range(f"layer {layer}"):
                self._compute(layer)
                time.sleep(self._layer_s)
            self._count_up()

    def _compute(self, layer: int) -> None:
        own = slice(layer * self._layout.pool_pages, (layer + 1) * self._layout.pool_pages)
        torch.add(self._page_steps, self._firsts[own], out=self._pages[own])
        if layer == self._layout.layers - 1:
            torch.add(self._tail_steps, self._firsts[-1], out=self._tail)

    def _count_up(self) -> None:
        self._word.add_(1)

    def _make_graph(self) -> torch.cuda.CUDAGraph:
        self._compute(self._layout.layers - 1)  # kernels are loaded before the capture
        self._word.add_(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(self._layout.layers):
                self._compute(layer)
                self._count_up()
        return graph
