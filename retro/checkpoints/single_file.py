"""A checkpoint as one file with weights, settings and fingerprints, which `checkpoint.open_checkpoint` reads."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from indexing.store.errors import InputError
from indexing.store.files import sync_folder
from retro.checkpoints.checkpoint import FORMAT_VERSION, Checkpoint, checksum, load_model
from retro.checkpoints.tensor_files import index, read_tensors, save_tensors


def export(checkpoint: Checkpoint, file: Path) -> None:
    """Write a checkpoint as one safetensors file, atomically. An existing file is replaced.

    LoRA is merged into the weights. Equal checkpoints give equal bytes.

    Raises:
        InputError: the file name does not end in `.safetensors`.
    """
    write_exported(*exported(checkpoint), file)


def exported(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The metadata of an exported checkpoint, and its weights with LoRA merged."""
    state = {key: getattr(checkpoint, key) for key in ("step", "tokens", "settings", "datastores", "fingerprint")}
    if checkpoint.num_ids != checkpoint.model.vocab_size:
        state["num_ids"] = checkpoint.num_ids
    if checkpoint.tokenizer:
        state["tokenizer"] = checkpoint.tokenizer
    if checkpoint.started_from:
        state["started_from"] = checkpoint.started_from
    if checkpoint.lora.rank:
        state["settings"] = {key: value for key, value in checkpoint.settings.items() if key != "lora"}
        return state, load_model(checkpoint, torch.device("cpu")).state_dict()
    return state, read_tensors(index(checkpoint.weights))


def write_exported(state: dict[str, Any], tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write tensors and metadata as one file, and add the format version and a checksum.

    The header's metadata have JSON under `retro`: `format_version`, `step`, `tokens`, `settings` with those of the
    model, fingerprints of the `datastores` and of the checkpoint (`fingerprint`), and a `checksum` of all this and of
    the tensors.

    Raises:
        InputError: the file name does not end in `.safetensors`.
    """
    if file.suffix != ".safetensors":
        raise InputError(f"to = {str(file)!r}: the name must end in .safetensors.")
    state = {**state, "format_version": FORMAT_VERSION}
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        save_tensors(tensors, temporary)
        state = state | {"checksum": checksum(state, temporary)}
        # A single entry, because safetensors writes several in any order.
        save_tensors(tensors, temporary, {"retro": json.dumps(state, sort_keys=True)})
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(file.parent)
