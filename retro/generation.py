"""Sampling with retrieval: at every chunk boundary the chunk just finished asks the datastore for neighbors.

prompt → tokens → (a chunk is full → its neighbors) → logits → next token → …
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from indexing.store.errors import InputError
from retro.device import Placement
from retro.model import Retro

Retrieve = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Chunks [n, m] → neighbors [n, K, R] int64 and their lengths [n, K] int64."""


@dataclass(frozen=True)
class GenerationSettings:
    """How the next token is drawn."""

    max_tokens: int = 128
    """Tokens to generate at most; the end of the document ends it too."""
    temperature: float = 0.8
    """0 takes the likeliest token."""
    top_k: int = 50
    """Only the likeliest this many; 0 = all."""
    top_p: float = 0.95
    """Only the likeliest that together hold this probability."""
    seed: int = 0
    """Of the draws."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"generation.max_tokens = {self.max_tokens}: must be at least 1.")
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise InputError(
                "generation.temperature and generation.top_k must be 0 or more, generation.top_p in (0, 1]."
            )


@torch.inference_mode()
def generate(
    model: Retro,
    prompt: np.ndarray,
    settings: GenerationSettings,
    placement: Placement,
    *,
    eos_id: int,
    context: int,
    retrieve: Retrieve | None = None,
) -> Iterator[int]:
    """Yield tokens that continue a prompt.

    Args:
        model: in evaluation mode.
        prompt: [t] tokens, the beginning-of-document token first; at least one.
        settings: length and sampling.
        placement: device and precision.
        eos_id: the token that ends a document.
        context: tokens that the model sees at most, a multiple of the chunk length; older chunks are dropped whole.
        retrieve: finds and reads the neighbors of full chunks; None = retrieval OFF.
    """
    m = model.settings.chunk_length
    random = torch.Generator().manual_seed(settings.seed)
    tokens = np.asarray(prompt, dtype=np.int64)
    if not len(tokens):
        raise InputError("the prompt is empty: give at least the beginning-of-document token.")
    found: list[tuple[np.ndarray, np.ndarray]] = []  # neighbors of each full chunk of `tokens`
    for _ in range(settings.max_tokens):
        if len(tokens) > context:
            dropped = -(-(len(tokens) - context) // m)
            tokens, found = tokens[dropped * m :], found[dropped:]
        full = len(tokens) // m
        if retrieve is not None and full > len(found):
            neighbors, lengths = retrieve(tokens[len(found) * m : full * m].reshape(-1, m))
            found.extend(zip(neighbors, lengths, strict=True))
        with placement.autocast():
            hidden = model.hidden(
                **placement.put(
                    {
                        "tokens": torch.from_numpy(tokens[None]),  # [1, T]
                        "neighbors": _stacked(found, 0),
                        "neighbor_lengths": _stacked(found, 1),
                    }
                )
            )
            logits = model.logits(hidden[:, -1]).float()[0].cpu()
        token = _draw(logits, settings, random)
        if token == eos_id:
            return
        yield token
        tokens = np.append(tokens, token)


def _stacked(found: list[tuple[np.ndarray, np.ndarray]], part: int) -> torch.Tensor | None:
    """Neighbors [1, U, K, R] or their lengths [1, U, K] of the full chunks so far; None before the first."""
    return torch.from_numpy(np.stack([item[part] for item in found])[None]) if found else None


def _draw(logits: torch.Tensor, settings: GenerationSettings, random: torch.Generator) -> int:
    """One token from logits [V]: temperature, then the top k, then the top p of what is left."""
    if settings.temperature == 0:
        return int(logits.argmax())
    ordered, ids = (logits / settings.temperature).sort(descending=True, stable=True)
    if settings.top_k:
        ordered, ids = ordered[: settings.top_k], ids[: settings.top_k]
    probabilities = ordered.softmax(0)
    before = probabilities.cumsum(0) - probabilities  # of everything likelier; the likeliest always stays
    probabilities[before >= settings.top_p] = 0
    return int(ids[torch.multinomial(probabilities, 1, generator=random)])
