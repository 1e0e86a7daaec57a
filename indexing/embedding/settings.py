"""How chunks become unit vectors: the settings, and what every embedder does.

All embeddings have unit length, so squared L2 distance (the paper's metric) orders as cosine does: d² = 2 − 2·cos.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import Field, NonNegativeInt

from indexing.store.errors import InputError
from indexing.store.files import write_json
from indexing.store.settings import settings

FIT_CHUNKS = 200_000
"""Chunks sampled over all shards to count document frequencies of n-grams."""


@settings
class EmbedderSettings:
    """Embedding of chunks."""

    kind: Literal["lexical", "transformer"] = "lexical"
    """`lexical` needs no download. `transformer` runs the model at `path`."""
    dimension: Annotated[int, Field(ge=8, le=2**16)] = 256
    """Width of lexical embeddings. A transformer has its own width."""
    bigram_buckets: Annotated[int, Field(ge=1, le=2**31)] = 2**18
    """Lexical: hash buckets for token bigrams. A process that embeds holds 4 * dimension bytes for each: 268 MB with
    the defaults. Fewer of them save memory and find neighbors that are as useful (docs/results/which-neighbors.md)."""
    seed: NonNegativeInt = 0
    """Lexical: seed of the projection and of the sample."""
    path: str = ""
    """Transformer: a local folder or hub name for `transformers`; `minilm` is the model of the extra `retro[minilm]`.
    Lexical: a datastore whose embedder is copied with all its settings, so that each datastore can retrieve from the
    other. Empty: a new lexical embedder."""
    pooling: Literal["auto", "mean", "cls"] = "auto"
    """Transformer: `auto` uses the setting of a sentence-transformers folder, and `mean` without one."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Transformer: `auto` is bfloat16 if the device is faster with it, else float32."""
    device: str = "auto"
    """Transformer: `auto`, `cpu`, `cuda`, `cuda:1` …"""

    def __post_init__(self) -> None:
        if self.kind == "transformer" and not self.path:
            raise InputError(
                "embedder.path is empty: embedder.kind = 'transformer' needs a local folder or a hub name, "
                "or 'minilm' after `pip install 'retro[minilm]'`."
            )

    def recipe(self) -> dict[str, Any]:
        """The settings that determine the vectors. The device does not."""
        if self.kind == "lexical" and self.path:
            return {"kind": self.kind}  # a copied embedder is an input of the recipe, with its settings
        lexical = ("kind", "dimension", "bigram_buckets", "seed")
        transformer = ("kind", "path", "pooling", "precision")
        return {key: getattr(self, key) for key in (lexical if self.kind == "lexical" else transformer)}


class Embedder(Protocol):
    """Turns tokens into unit vectors."""

    dimension: int

    def embed(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Tokens [n, t] and lengths [n] → [n, dimension] float32 of unit length, also for chunks without content.

        Raises:
            NotFinite: it has no finite vector for a chunk. `unit` checks.
        """


def write_settings(folder: Path, settings: EmbedderSettings) -> None:
    """Write `embedder.json`. A transformer embedder needs nothing else: its weights stay at `path`."""
    write_json(folder / "embedder.json", asdict(settings))


def from_json(**values: Any) -> EmbedderSettings:
    """Settings that `write_settings` wrote, now or in a version that had `batch_tokens` and `fit_chunks`."""
    return EmbedderSettings(**{key: values[key] for key in values.keys() - {"batch_tokens", "fit_chunks"}})


class NotFinite(InputError):
    """The embedder returned NaN or infinite numbers for some chunks.

    Attributes:
        rows: numbers of these chunks in the call, in order.
        text: the text of the first, if it is known.
    """

    def __init__(self, rows: Sequence[int], text: str = "") -> None:
        super().__init__(rows, text)  # the arguments of a copy in another process
        self.rows, self.text = rows, text

    def __str__(self) -> str:
        of_text = f" for a text that begins {self.text[:60]!r}" if self.text else ""
        return (
            f"the embedder returns numbers that are not finite{of_text}. Set embedder.precision = 'float32', choose another "
            "embedder, or leave the text out."
        )


def unit(vectors: np.ndarray, texts: Sequence[str] = ()) -> np.ndarray:
    """Scale rows to unit length. A row without content becomes the first axis. A zero row would be nearer to every unit
    vector (d² = 1) than almost all of them are to each other (d² ≈ 2), and so a neighbor of all.

    Raises:
        NotFinite: a row has a number, or a length, that is not finite. The message quotes its text, if `texts` are
            given.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not np.isfinite(norms).all():
        rows = np.flatnonzero(~np.isfinite(norms[:, 0])).tolist()
        raise NotFinite(rows, texts[rows[0]] if texts else "")
    empty = norms[:, 0] < 1e-6
    out = vectors / np.maximum(norms, 1e-12)
    out[empty] = 0
    out[empty, 0] = 1
    return out
