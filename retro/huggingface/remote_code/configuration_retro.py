"""Configuration of an exported model for transformers."""

from dataclasses import asdict
from typing import Any

from transformers import PretrainedConfig

from retro.model.settings import ModelSettings, from_json


class RetroConfig(PretrainedConfig):
    """Settings of the model, metadata of the checkpoint, and the default source of neighbors.

    Attributes:
        model_settings: `ModelSettings`, with its sections.
        num_ids: number of the tokenizer's ids; further rows of the embeddings are unused.
        context: context length in generation, a multiple of the chunk length.
        checkpoint: step, tokens, settings and fingerprints of the training run, and a checksum of its weights (`weights`).
        datastore: source for `retrieve_from`; None = retrieval OFF.
        k: number of neighbors of each chunk.
    """

    model_type = "retro"

    def __init__(
        self,
        model_settings: dict[str, Any] | None = None,
        num_ids: int = 0,
        context: int = 2048,
        checkpoint: dict[str, Any] | None = None,
        datastore: str | None = None,
        k: int = 2,
        **kwargs: Any,
    ) -> None:
        self.model_settings = asdict(from_json(model_settings or {}))
        self.num_ids = num_ids or self.model_settings["vocab_size"]
        self.context = context
        self.checkpoint = checkpoint or {}
        self.datastore = datastore
        self.k = k
        kwargs["tie_word_embeddings"] = self.model_settings["tied_embeddings"]
        super().__init__(**kwargs)

    @property
    def settings(self) -> ModelSettings:
        """`model_settings` as `ModelSettings`."""
        return from_json(self.model_settings)

    # Standard names that transformers and related libraries use.
    vocab_size = property(lambda self: self.model_settings["vocab_size"])
    hidden_size = property(lambda self: self.model_settings["d_model"])
    intermediate_size = property(lambda self: self.model_settings["d_ffw"])
    num_hidden_layers = property(lambda self: self.model_settings["num_layers"])
    num_attention_heads = property(lambda self: self.settings.attention.num_heads)
    num_key_value_heads = property(lambda self: self.settings.attention.kv_heads)
    head_dim = property(lambda self: self.settings.attention.head_dim)
