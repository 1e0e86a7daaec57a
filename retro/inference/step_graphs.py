"""One token of each row, replayed: on a GPU the host starts one graph in place of about a thousand kernels.

    first pass of a shape ─ record (`torch.cuda.graph`) ─► graph of all layers, reading and writing fixed tensors
    every other one ─ tokens and positions ─► its fixed inputs ─ replay ─► activations

A graph belongs to a number of rows (a power of two), of keys (a multiple of `KEY_STEP`) and of neighbors. Rows that are
missing work in the last slot of the cache, which no row uses. A pass that completes chunks searches and encodes
neighbors, so it runs as usual, as do prompts and drafts. When the cache grows, its graphs end.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from retro.inference.cache import Cache
from retro.inference.span import Span

log = logging.getLogger("retro")

RunLayers = Callable[[Span, bool], Tensor]
"""A span, and whether its rows read neighbors by cross-attention → activations [N, n, D]."""


class _Shape(NamedTuple):
    num_rows: int
    num_keys: int
    num_neighbors: int
    crosses: bool


class _Graph(NamedTuple):
    span: Span
    hidden: Tensor
    replay: Callable[[], object]


@dataclass
class StepGraphs:
    """The graphs of a model and a cache.

    Attributes:
        run_layers: the layers over a span.
    """

    run_layers: RunLayers
    _failed: bool = False
    _graphs: dict[_Shape, _Graph] = field(default_factory=dict)
    _recorded: list[Tensor] = field(default_factory=list)  # the cache's tensors that the graphs read and write
    _memory: Any = None  # of all graphs: no result is needed after the next replay

    def run(self, span: Span, crosses: bool, cache: Cache) -> Tensor:
        """Activations [N, 1, D] of a span with one token of each row, in the first slots."""
        num_rows = len(span.tokens)
        graph = None if self._failed else self._graph(span, crosses, cache)
        if graph is None:
            return self.run_layers(span, crosses)
        for name, fixed in _inputs(graph.span).items():
            fixed[:num_rows].copy_(_inputs(span)[name])
            fixed[num_rows:] = len(cache.keys) - 1 if name == "at" else 0
        graph.replay()
        return graph.hidden[:num_rows].clone()  # the next replay overwrites it

    def clear(self) -> None:
        """Free the graphs, and the cache that they read."""
        self._graphs, self._recorded, self._memory = {}, [], None

    def _graph(self, span: Span, crosses: bool, cache: Cache) -> _Graph | None:
        """The graph of a span's shape, recorded if it is new; None if that fails."""
        shape = _Shape(1 << (len(span.tokens) - 1).bit_length(), span.stop, span.num_neighbors, crosses)
        cache.make_slots(shape.num_rows + 1)
        if list(map(id, cache.tensors())) != list(map(id, self._recorded)):
            self.clear()
            self._recorded = cache.tensors()
        try:
            if shape not in self._graphs:
                self._graphs[shape] = self._record(shape, span, len(cache.keys) - 1)
        except RuntimeError as error:
            self._failed = True
            log.warning("generation starts each kernel alone, which takes longer: no CUDA graph of a step: %s", error)
            return None
        return self._graphs[shape]

    def _record(self, shape: _Shape, like: Span, unused: int) -> _Graph:
        """Record the layers over rows in the unused slot: what recording computes is not kept."""
        fixed = {
            name: torch.zeros(shape.num_rows, *one.shape[1:], dtype=one.dtype, device=one.device)
            for name, one in _inputs(like).items()
        }
        fixed["at"].fill_(unused)
        none = np.empty(0, np.int64)
        whole = like._asdict() | fixed | {"rows": [], "places": none, "starts": none}
        span = Span(**whole | {"slots": slice(0, shape.num_rows)})
        hidden, replay, self._memory = record(lambda: self.run_layers(span, shape.crosses), self._memory)
        return _Graph(span, hidden, replay)


def _inputs(span: Span) -> dict[str, Tensor]:
    """The tensors of a span, which change from step to step. Their first dimension is the rows."""
    return {name: value for name, value in span._asdict().items() if isinstance(value, Tensor)}


def record(work: Callable[[], Tensor], memory: Any = None) -> tuple[Tensor, Callable[[], object], Any]:
    """Record work on the current GPU: its result, which every replay overwrites, the replay, and the memory of both.

    `memory` is that of an earlier recording, to share; None = new.
    """
    dtype, enabled = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
    # Casts that autocast keeps would be freed while the graph still reads them.
    with torch.autocast("cuda", dtype, enabled=enabled, cache_enabled=False):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is loaded at the first use cannot be loaded while recording
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, which search or embed, may use the device meanwhile.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            result = work()
    return result, graph.replay, graph.pool()
