"""`config.json` of an exported model, as transformers knows it."""

from dataclasses import asdict
from typing import Any

from transformers import PretrainedConfig

from retro.model.settings import ModelSettings, from_json


class RetroConfig(PretrainedConfig):
    """Sizes of the model, what the checkpoint was, and what is retrieved from where nothing else is said.

    Attributes:
        model_settings: `ModelSettings`, with its sections.
        num_ids: ids of the tokenizer; rows of the tables beyond them stand for nothing.
        context: tokens that generation lets the model see at most, a multiple of the chunk length.
        checkpoint: step, tokens, settings and fingerprints of the training run, and a checksum of its weights (`weights`).
        datastore: what `retrieve_from` takes; None = retrieval OFF.
        k: neighbors of each chunk.
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
        """The same as the model takes them."""
        return from_json(self.model_settings)

    # What transformers and its friends look for, by their names.
    vocab_size = property(lambda self: self.model_settings["vocab_size"])
    hidden_size = property(lambda self: self.model_settings["d_model"])
    intermediate_size = property(lambda self: self.model_settings["d_ffw"])
    num_hidden_layers = property(lambda self: self.model_settings["num_layers"])
    num_attention_heads = property(lambda self: self.settings.attention.num_heads)
    num_key_value_heads = property(lambda self: self.settings.attention.kv_heads)
    head_dim = property(lambda self: self.settings.attention.head_dim)
