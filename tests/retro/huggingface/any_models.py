"""Small random decoders of families that this project does not compute itself, and a datastore with their tokenizer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from indexing.store.datastore import Datastore
from indexing.tokenization.settings import TokenizerSettings
from tests.conftest import build_local, tiny_config, write_byte_tokenizer
from tests.planted import write_planted

END, PAD = "<|endoftext|>", "<|pad|>"
V = 258
_SIZES: dict[str, Any] = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 256}
_SIZES |= {"eos_token_id": 256, "pad_token_id": 257}
_ATTENTION = _SIZES | {"num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 1024}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": _ATTENTION,
    "phi": _ATTENTION,
    "gemma": _ATTENTION | {"num_key_value_heads": 1, "head_dim": 16},
    "mamba": _SIZES | {"state_size": 4},
    "llama": _ATTENTION,
}
"""`model_type` → its configuration. `llama` is also computed by this project."""


def save_model(folder: Path, family: str) -> Path:
    """Save a model with its tokenizer, as users do."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("embed_tokens.weight", "embed_in.weight", "embeddings.weight")):
                parameter.normal_(std=0.3)  # texts differ
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path, *more: str) -> Path:
    """Save the tokenizer: the 256 bytes, and special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    special = {"bos_token": END, "eos_token": END, "pad_token": PAD, "tokenizer_class": "PreTrainedTokenizerFast"}
    write_byte_tokenizer(folder, [*more, END, PAD], **special)
    return folder


def build_planted(folder: Path, tokenizer: Path) -> Datastore:
    """A datastore of random words; held-out documents copy passages of training documents."""
    corpus = write_planted(folder / "planted.jsonl")
    settings = TokenizerSettings(kind="huggingface", path=str(tokenizer))
    config = tiny_config(folder, corpus, tokenizer=settings, skip_stages=())
    return build_local(replace(config, corpus=replace(config.corpus, shard_bytes=100_000)))


def planted_texts(folder: Path) -> dict[str, str]:
    """The documents of `build_planted` by their ids."""
    rows = map(json.loads, (folder / "planted.jsonl").read_text().splitlines())
    return {row["id"]: row["text"] for row in rows}
