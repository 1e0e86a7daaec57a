"""The model card of an exported folder: what the model is, what was measured of it, how to load it."""

from collections.abc import Sequence
from typing import Any

import torch

from retro.checkpoints.checkpoint import Checkpoint
from retro.model.presets import count_parameters
from retro.model.retro import Retro
from retro.model.settings import ModelSettings
from retro.training.run_folder import read_metrics

_HEADER = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- retro
- retrieval-augmented
---
"""


def model_card(checkpoint: Checkpoint, name: str) -> str:
    """README.md of a folder of this name."""
    retrieves = bool(checkpoint.model.retrieval.cca_layers)
    sections = [
        _HEADER + f"\n# {name}",
        _what_it_is(checkpoint.model),
        "## Facts\n\n" + _table(_facts(checkpoint)),
        "## Held-out text\n\n" + _figures(checkpoint),
        "## How to load it\n\n" + _loading(name, checkpoint.model, retrieves),
        "## Limits\n\n" + _limits(checkpoint.model),
    ]
    return "\n\n".join(sections) + "\n"


def _what_it_is(model: ModelSettings) -> str:
    if not model.retrieval.cca_layers:
        return "A decoder-only language model, trained as a baseline without retrieval."
    layers = ", ".join(map(str, model.retrieval.cca_layers))
    return (
        "A retrieval-enhanced transformer (RETRO, Borgeaud et al. 2022, arXiv 2112.04426). Every chunk of "
        f"{model.chunk_length} tokens can ask a datastore for its nearest neighbors, which an encoder reads and the decoder's layers "
        f"{layers} attend to (chunked cross-attention). Without a datastore the same weights are a plain decoder (retrieval OFF)."
    )


def _facts(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    model = checkpoint.model
    with torch.device("meta"):
        built = Retro(model)
    total, inner = count_parameters(built, embeddings=True), count_parameters(built)
    facts = [
        ("parameters", f"{total:,}, of which {total - inner:,} in embeddings and the output layer"),
        ("decoder", f"layers: {model.num_layers}, width: {model.d_model}, heads: {model.attention.num_heads}"),
    ]
    if model.retrieval.cca_layers:
        facts.append(("encoder of neighbors", f"layers: {model.encoder.num_layers}, width: {model.encoder.d_model}"))
    facts += [
        ("vocabulary", f"{model.vocab_size:,} tokens"),
        ("context", f"{checkpoint.settings['data']['sequence_length']:,} tokens"),
        ("trained on", f"{checkpoint.tokens:,} tokens in {checkpoint.step:,} steps"),
        ("fingerprint of the checkpoint", f"`{checkpoint.fingerprint}`"),
    ]
    facts += [("fingerprint of a datastore it was trained on", f"`{each}`") for each in checkpoint.datastores]
    return facts


def _figures(checkpoint: Checkpoint) -> str:
    """What was measured at the checkpoint's step, ON and OFF, set by set."""
    line = _measured(checkpoint)
    sets: dict[str, dict[str, float]] = {}
    for key, value in line.items():
        name, found, mode = key.rpartition("_bits_per_byte_")
        if found and mode in ("off", "on"):
            sets.setdefault(name, {})[mode] = value
    if not sets:
        return "Nothing was measured at this step of training, or the run's metrics were not at hand."
    rows = [
        (name, *(f"{modes[mode]:.4f}" if mode in modes else "" for mode in ("off", "on")))
        for name, modes in sets.items()
    ]
    train, data = checkpoint.settings["train"], checkpoint.settings["data"]
    return (
        f"Bits per byte (lower is better) over the first {train['eval_tokens']:,} tokens or so of documents that were held out of "
        f"training and datastore, measured while training, at step {checkpoint.step:,}. ON reads {data['k']} neighbors of each chunk, OFF none.\n\n"
        + _table(rows, ("evaluation set", "OFF", "ON"))
    )


def _measured(checkpoint: Checkpoint) -> dict[str, Any]:
    """The figures that the run has logged at the checkpoint's step."""
    folder, line = checkpoint.path.resolve().parent, dict[str, Any]()
    if folder.name == "checkpoints":
        for each in read_metrics(folder.parent):
            line |= each if each.get("step") == checkpoint.step else {}
    return line


def _loading(name: str, model: ModelSettings, retrieves: bool) -> str:
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)',
        f'model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)',
    ]
    if retrieves:
        lines += [
            'model.retrieve_from("http://127.0.0.1:8080", k=2)  # a `retro serve DATASTORE`; without this line retrieval is OFF',
        ]
    lines += [
        'inputs = tokenizer(["A text to continue", "Another"], return_tensors="pt", padding=True)',
        "print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=64), skip_special_tokens=True))",
    ]
    text = "```python\n" + "\n".join(lines) + "\n```\n\n"
    text += "Needed: `torch`, `transformers`, `einops`, and `sentencepiece` where the folder holds a `tokenizer.model`."
    if retrieves:
        text += (
            "\n\nThe datastore is named by the URL of a server, for which nothing else has to be installed, or by its folder, which the "
            "package `retro` searches; also as `from_pretrained(…, datastore=…, k=2)`. It must have this tokenizer and chunks of "
            f"{model.chunk_length} tokens."
        )
    return text


def _limits(model: ModelSettings) -> str:
    limits = [
        "It continues texts as its training text would; it was not tuned to follow instructions unless the settings in config.json say so.",
        "What it says may be wrong, and may repeat training text and datastore word for word.",
        f"Whole chunks have neighbors: up to the first {model.chunk_length} tokens of a text ON and OFF are the same.",
        "Of a text that outgrows the context the oldest quarter is dropped.",
        "License and languages are those of the training text: add them here before publishing.",
    ]
    if not model.retrieval.cca_layers:
        limits.pop(2)
    return "\n".join(f"- {limit}" for limit in limits)


def _table(rows: Sequence[tuple[str, ...]], header: tuple[str, ...] = ("", "")) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
