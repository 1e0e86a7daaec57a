"""A model small enough for loops and gradients, and batches for it."""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor

from indexing.suffixes.votes import COLUMNS, KEPT, LENGTHS, SHARES
from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL, summed_loss
from retro.copying.rows import RetrieveNeighbors, Row
from retro.device import Placement, choose_placement
from retro.inference.decoder import Decoder
from retro.model.retro import Retro
from retro.model_settings import (
    NO_COPY_HEAD,
    AttentionSettings,
    EncoderSettings,
    ModelSettings,
    RetrievalSettings,
    updated,
)
from retro.parallel.forward_backward import StepContext, WholeModel, part_of_loss
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ALONE
from retro.training.settings import TrainSettings
from retro.training.step import OptimizerStep, StepResult

B, U, M, K, R, V = 2, 4, 4, 2, 7, 50  # r need not be 2m
T = U * M
DOCUMENTS = torch.tensor([[3, 3, 4, 4], [5, 6, 6, 6]])  # [B, U]
SETTINGS = ModelSettings(
    vocab_size=V,
    d_model=32,
    d_ffw=64,
    attention=AttentionSettings(num_heads=2, head_dim=16),
    num_layers=4,
    retrieval=RetrievalSettings(cca_layers=(2, 4)),
    encoder=EncoderSettings(d_model=24, d_ffw=48, num_heads=2, head_dim=8),
    chunk_length=M,
    copy_head=NO_COPY_HEAD,
)
SCHEMES: dict[str, dict[str, Any]] = {
    "rope": {},
    "transformer-xl": {"attention.positions": "transformer-xl"},
    "smeared": {"attention.smeared_tokens": 3},
    "alibi": {
        "attention.positions": "alibi",
        "attention.num_kv_heads": 1,
        "activation": "swiglu",
        "attention.smeared_tokens": 1,
    },
    "prefix": {"attention.prefix_tokens": 3, "attention.num_kv_heads": 1},
    "learned": {
        "attention.positions": "learned",
        "attention.max_positions": 4 * T,
        "attention.qk_norm": True,
        "init": "mup",
        "mup_base_width": 16,
    },
    "copying": {"copy_head.context": True, "copy_head.neighbors": True},
    "neox": {  # with Llama 3's scaling
        "norm": "layer",
        "norm_eps": 1e-5,
        "attention.bias": "all",
        "feed_forward_bias": True,
        "activation": "gelu-tanh",
        "parallel_residual": True,
        "rope.theta": 500.0,
        "rope.partial_rotary_factor": 0.5,
        "rope.scaling": "llama3",
        "rope.factor": 4.0,
        "rope.original_max_positions": 64,
        "scaled_embeddings": False,
    },
}
READERS: dict[str, dict[str, Any]] = {
    "reading": {  # the decoder reads neighbors itself: Qwen3 with a sliding window
        "retrieval.reader": "decoder",
        "retrieval.cca_layers": (),
        "attention.num_kv_heads": 1,
        "attention.qk_norm": True,
        "attention.bias": "qkv",
        "attention.sliding_window": 6,
        "activation": "swiglu",
        "norm_eps": 1e-5,
    },
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
every_scheme_and_reader = pytest.mark.parametrize("scheme", [*SCHEMES, *READERS])
few = settings(max_examples=8, deadline=None, derandomize=True)
MODELS: dict[str, Retro] = {}


def build(scheme: str = "rope", **changes: Any) -> Retro:
    """A small model in which every part matters: all parameters are perturbed, as biases u and v start at zero."""
    torch.manual_seed(0)
    model = Retro(updated(SETTINGS, {**(SCHEMES | READERS)[scheme], **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def cached_model(scheme: str) -> Retro:
    """The model of a scheme, built once. Tests do not change its weights."""
    return MODELS.setdefault(scheme, build(scheme))


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """tokens [B, T], neighbors [B, U, K, R] and their lengths [B, U, K]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (B, T), generator=generator)
    neighbors = torch.randint(V, (B, U, K, R), generator=generator)
    return tokens, neighbors, torch.randint(1, R + 1, (B, U, K), generator=generator)


def votes(num_tokens: int = V, seed: int = 0) -> Tensor:
    """Votes of any length for one to three of the first tokens, at some positions: int64 [B, T, 32]."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(-10, 40, (B, T, 1), generator=generator).clamp(min=0)
    tokens = torch.argsort(torch.rand(B, T, num_tokens, generator=generator))[..., :KEPT]
    reached = (length >= torch.tensor(LENGTHS))[..., None]  # [B, T, L, 1]
    size = torch.randint(1, 12, (*reached.shape[:3], 1), generator=generator)
    shares = torch.randint(0, SHARES // KEPT + 1, (*reached.shape[:3], KEPT), generator=generator)
    shares[..., :1] = shares[..., :1].clamp(min=1)
    of_lengths = torch.cat((size, shares), -1) * reached
    return torch.cat((length, tokens, of_lengths.flatten(2)), dim=-1)


def agreed_votes(tokens: Tensor, length: int = 20, size: int = 4) -> Tensor:
    """Votes after matches of this length that agree on tokens [B, T]: int64 [B, T, 32]."""
    found = torch.zeros(*tokens.shape, COLUMNS, dtype=torch.int64)
    found[..., 0], found[..., 1] = length, tokens
    of_lengths = found[..., 1 + KEPT :].unflatten(-1, (len(LENGTHS), 1 + KEPT))
    reached = torch.tensor(LENGTHS) <= length
    of_lengths[..., 0], of_lengths[..., 1] = size * reached, SHARES * reached
    return found


def inputs(*, on: bool = True, documents: bool = False) -> Inputs:
    """The tokens of `batch` with the next ones as labels."""
    tokens, neighbors, lengths = batch()
    labels, of_documents = tokens.roll(-1, 1), DOCUMENTS if documents else None
    whole = Inputs(tokens, of_documents, neighbors, lengths, votes=votes(), labels=labels)
    return whole if on else whole.off()


def answers_only(num_rows: int = 4) -> Inputs:
    """A fine-tuning batch with labels on answers only: one label in each row of the first half, all in the others."""
    drawn = [batch(seed) for seed in range(num_rows // B)]
    tokens, neighbors, lengths = (torch.cat(each) for each in zip(*drawn, strict=True))
    labels = tokens.roll(-1, 1)
    labels[: num_rows // 2, 1:] = IGNORED_LABEL
    return Inputs(tokens, None, neighbors, lengths, labels=labels)


def split_batch(whole: Inputs, count: int) -> list[Inputs]:
    """Split a batch into `count` batches, in order."""
    size = len(whole.tokens) // count
    return [whole.rows(slice(start, start + size)) for start in range(0, count * size, size)]


def step_of(
    model: Retro, optimizer: torch.optim.Optimizer, batches: Iterator[Inputs], settings: TrainSettings
) -> Callable[[int], StepResult]:
    """The trainer's step for a model trained by one process in float32."""
    placement = choose_placement("cpu", "float32")
    processes = Processes(ALONE, placement.device)
    passes = WholeModel(model, processes, placement)
    step, count = OptimizerStep(passes, optimizer, processes, placement, settings), settings.gradient_accumulation_steps
    return lambda number: step(number, [next(batches) for _ in range(count)])


def loss_of(model: Retro, labels: Tensor, *inputs: Tensor | None) -> Tensor:
    """Mean loss of labels [B, T], copying included. The other arguments are those of `Inputs`."""
    whole = Inputs(*inputs)._replace(labels=labels)
    hidden, _ = model.hidden(whole)
    context = StepContext((labels != IGNORED_LABEL).sum(), len(labels), 1.0, last=True)
    return part_of_loss(model, hidden, labels, model.evidence(whole), None, context)[0]


def plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of labels with the vocabulary alone; 0 if all are ignored."""
    return summed_loss(hidden, weight, labels)[0] / (labels != IGNORED_LABEL).sum().clamp(min=1)


class Together:
    """A decoder whose rows are always read together: prompts first, then one token of each row."""

    def __init__(self, model: Retro, placement: Placement, context: int, *retrieve: RetrieveNeighbors | None) -> None:
        """`retrieve` is one function for all rows, or one for each row; by default retrieval is OFF."""
        self.decoder, self.retrieve, self.rows = Decoder(model, placement, context), retrieve or (None,), list[Row]()

    def read(self, tokens: Sequence[np.ndarray]) -> Tensor:
        """Append the prompts or one token per row; return the logits of the next token, [rows, V]."""
        if not self.rows:
            self.rows = [self.decoder.add(*each) for each in zip(tokens, cycle(self.retrieve))]
        else:
            for row, (token,) in zip(self.rows, tokens, strict=True):
                self.decoder.append(row, token)
        return self.decoder.read(self.rows)

    def keep(self, places: Sequence[int]) -> None:
        """Remove all rows except these."""
        kept = [self.rows[place] for place in places]
        for row in self.rows:
            if row not in kept:
                self.decoder.remove(row)
        self.rows = kept


@torch.no_grad()
def logits(model: Retro, *inputs: Tensor | None) -> Tensor:
    return model(Inputs(*inputs))


def first_difference(a: Tensor, b: Tensor) -> int:
    """First position of [B, T, V] at which two outputs differ in any bit; T if they are equal."""
    differs = (a != b).any(-1).any(0)
    return int(differs.int().argmax()) if differs.any() else T


def neighbor_table(model: Retro) -> Tensor:
    """The embeddings of neighbors."""
    return model.embedding.weight if model.settings.decoder_reads else model.encoder.embedding.weight


def embedding_gradients(model: Retro, output: Tensor, table: Tensor) -> Tensor:
    """Sums of absolute gradients by token id: nonzero for the ids on which the output depends."""
    return torch.autograd.grad(output, table, retain_graph=True)[0].abs().sum(-1)
