"""Model card of an exported folder: description, metadata, results, how to load it, limits."""

from collections.abc import Sequence
from typing import Any

from retro.checkpoints.checkpoint import Checkpoint
from retro.model.presets import count_parameters
from retro.model.retro import Retro
from retro.model.shapes import shapes_only
from retro.model_settings import ModelSettings
from retro.training.run_folder import read_metrics

_HEADER = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- retro
- retrieval-augmented
---
"""


def model_card(checkpoint: Checkpoint, name: str, needs_package: bool) -> str:
    """Return the text of README.md for a folder of this name; `needs_package` says that transformers lacks one of its
    classes."""
    sections = [
        _HEADER + f"\n# {name}",
        _description(checkpoint.model),
        "## Metadata\n\n" + _table(_metadata(checkpoint)),
        "## Results on held-out text\n\n" + _results(checkpoint),
        "## How to load the model\n\n" + _loading(name, checkpoint.model, needs_package),
        "## Limits\n\n" + _limits(checkpoint.model),
    ]
    return "\n\n".join(sections) + "\n"


def _description(model: ModelSettings) -> str:
    if not model.retrieves:
        return "A decoder-only language model, trained as a baseline without retrieval."
    layers = ", ".join(map(str, model.retrieval.cca_layers))
    reading = [
        f"an encoder reads them, and the decoder's layers {layers} attend to the result (chunked cross-attention)"
    ]
    itself = ["the decoder reads each alone, and its self-attention reads the result"] * model.decoder_reads
    copying = ["a copy head predicts what followed the same text in them"] * bool(model.copy_head.neighbors)
    return (
        "A retrieval-enhanced transformer (RETRO, Borgeaud et al. 2022, arXiv 2112.04426). With retrieval ON, the model reads the "
        f"nearest neighbors of every chunk of {model.chunk_length} tokens from a datastore: "
        f"{'; '.join(reading * bool(layers) + itself + copying)}. With retrieval OFF the same weights are a plain decoder."
    )


def _metadata(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    model = checkpoint.model
    with shapes_only():
        built = Retro(model)
    total, inner = count_parameters(built, embeddings=True), count_parameters(built)
    rows = [
        ("parameters", f"{total:,}, including {total - inner:,} in embeddings and the output layer"),
        ("decoder", f"layers: {model.num_layers}, width: {model.d_model}, heads: {model.attention.num_heads}"),
    ]
    if model.retrieval.cca_layers:
        rows.append(("encoder of neighbors", f"layers: {model.encoder.num_layers}, width: {model.encoder.d_model}"))
    rows += [
        ("vocabulary", f"{model.vocab_size:,} tokens"),
        ("context", f"{checkpoint.settings['data']['sequence_length']:,} tokens"),
        ("trained on", f"{checkpoint.tokens:,} tokens in {checkpoint.step:,} steps"),
        ("fingerprint of the checkpoint", f"`{checkpoint.fingerprint}`"),
    ]
    rows += [("fingerprint of a training datastore", f"`{datastore}`") for datastore in checkpoint.datastores]
    return rows


def _results(checkpoint: Checkpoint) -> str:
    """Results at the checkpoint's step for each evaluation set, ON and OFF."""
    line = _measured(checkpoint)
    sets: dict[str, dict[str, float]] = {}
    for key, value in line.items():
        name, separator, mode = key.rpartition("_bits_per_byte_")
        if separator and mode in ("off", "on"):
            sets.setdefault(name, {})[mode] = value
    if not sets:
        return "There are no results for this step of training, or the run's metrics were not available."
    rows = [
        (name, *(f"{modes[mode]:.4f}" if mode in modes else "" for mode in ("off", "on")))
        for name, modes in sets.items()
    ]
    train, data = checkpoint.settings["train"], checkpoint.settings["data"]
    return (
        f"Bits per byte (lower is better) over about the first {train['eval_tokens']:,} tokens of held-out documents, which are "
        f"neither in the training data nor in the datastore, measured during training at step {checkpoint.step:,}. ON reads "
        f"{data['k']} neighbors of each chunk, OFF none.\n\n" + _table(rows, ("evaluation set", "OFF", "ON"))
    )


def _measured(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the metrics that the run logged at the checkpoint's step."""
    folder, line = checkpoint.path.resolve().parent, dict[str, Any]()
    if folder.name == "checkpoints":
        for metrics in read_metrics(folder.parent):
            line |= metrics if metrics.get("step") == checkpoint.step else {}
    return line


def _loading(name: str, model: ModelSettings, needs_package: bool) -> str:
    lines = ["import retro.huggingface.register  # adds the folder's classes to transformers"] * needs_package + [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        f'model = AutoModelForCausalLM.from_pretrained("{name}")',
    ]
    if model.retrieves:
        lines += [
            'model.retrieve_from("http://127.0.0.1:8080", k=2)  # a `retro serve DATASTORE`; without this line retrieval is OFF',
        ]
    lines += [
        'inputs = tokenizer(["A text to continue", "Another"], return_tensors="pt", padding=True)',
        "print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=64), skip_special_tokens=True))",
    ]
    text = (
        "```python\n" + "\n".join(lines) + "\n```\n\nThis folder holds no code, so `trust_remote_code` is not needed."
    )
    if needs_package:
        text += (
            " The classes are in the package `retro`. Without the first line, transformers does not recognize the model type `retro` "
            "or the tokenizer."
        )
    if model.retrieves:
        text += (
            "\n\nRetrieve from the URL of a server, or from the folder or URL of a datastore. `from_pretrained(…, datastore=…, k=2)` "
            f"does the same. The datastore must have this tokenizer and chunks of {model.chunk_length} tokens."
        )
    return text


def _limits(model: ModelSettings) -> str:
    limits = [
        "The model continues text in the style of its training text. It does not follow instructions unless config.json has "
        "settings of a fine-tuning.",
        "Its output may be wrong, and may repeat training text or the datastore word for word.",
        f"Only complete chunks have neighbors: ON and OFF agree on the first {model.chunk_length} tokens of a text.",
        "When a text exceeds the context, the oldest quarter is dropped.",
        "License and languages are those of the training text. Add them here before you publish the model.",
    ]
    if not model.retrieves:
        limits.pop(2)
    if model.copy_head.datastore:
        limits.append(
            "It does not copy from the whole datastore here, as it does in `retro` (`model.copy_head.datastore`)."
        )
    return "\n".join(f"- {limit}" for limit in limits)


def _table(rows: Sequence[tuple[str, ...]], header: tuple[str, ...] = ("", "")) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
