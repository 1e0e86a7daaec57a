"""Export a checkpoint to a folder for `AutoModelForCausalLM.from_pretrained(FOLDER)`, and read it back.

    checkpoint ─► config.json, model*.safetensors, generation_config.json     `export_folder`
               ─► tokenizer (tokenizer_files.py), README.md (model_card.py)
    folder ─► metadata and tensors                                            `read_folder`

The folder has no code: `import retro.huggingface.register` adds the classes of `modeling.py` and `tokenization.py` to
transformers. Tensors have their names in `Retro` with the prefix `model.`. A plain decoder that one of the families
(families.py) can express is written as a model of that family, whose class transformers has.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from indexing.store.errors import InputError
from indexing.store.files import sync_folder, write_bytes, write_json
from indexing.store.retrieval_set import tokenizer_fingerprint
from indexing.tokenization.backends import read_object
from indexing.tokenization.installation import open_huggingface
from indexing.tokenization.metadata import MODEL
from indexing.tokenization.tokenizer import Tokenizer
from retro.checkpoints.checkpoint import FORMAT_VERSION, Checkpoint, check_version
from retro.checkpoints.single_file import exported
from retro.checkpoints.tensor_files import index, read_tensors
from retro.huggingface.families import config_of
from retro.huggingface.import_folder import check_finite, open_weights
from retro.huggingface.model_card import model_card
from retro.huggingface.tensor_names import NAMES
from retro.huggingface.tokenizer_files import copy_tokenizer, write_tokenizer

_PREFIX = "model."


def export_folder(
    checkpoint: Checkpoint, folder: Path, *, datastore: str = "", tokenizer: str = "", max_shard_size: str = "5GB"
) -> None:
    """Write a checkpoint in Hugging Face's format. The folder appears complete or not at all.

    Args:
        checkpoint: any checkpoint.
        folder: new or empty folder.
        datastore: datastore with the tokenizer; empty = the first datastore of the training run.
        tokenizer: folder with a tokenizer in Hugging Face's format, copied unchanged; empty = the datastore's
            tokenizer, or for an imported model without datastore, the tokenizer of its original folder.
        max_shard_size: largest size of a file of weights, in the notation of huggingface_hub.

    Raises:
        InputError: the folder is not empty, the tokenizer is missing or does not fit the model,
            or huggingface_hub is not installed.
    """
    check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        ids = _write_tokenizer(checkpoint, work, datastore, tokenizer)
        state, tensors = exported(checkpoint)
        family = as_family(checkpoint, tensors)
        config, renamed = family or _as_retro(checkpoint, state, tensors)
        needs_package = family is None or (work / MODEL).exists()
        write_bytes(work / "README.md", model_card(checkpoint, folder.name, needs_package).encode())
        _save(renamed, work, max_shard_size)
        config["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        write_json(work / "config.json", config | ids)
        write_json(work / "generation_config.json", ids)
        if folder.exists():
            folder.rmdir()
        os.rename(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    sync_folder(folder.parent)


def check_new(folder: Path) -> None:
    """Raise InputError unless the folder is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"to = {str(folder)!r} exists and is not empty: remove it, or name another folder.")


Written = tuple[dict[str, Any], dict[str, Tensor]]
"""config.json without token ids and dtype, and the tensors by their names in the files."""


def _as_retro(checkpoint: Checkpoint, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> Written:
    data = checkpoint.settings["data"]
    config = {
        "model_type": "retro",
        "architectures": ["RetroForCausalLM"],
        "model_settings": asdict(checkpoint.model),
        "num_ids": checkpoint.num_ids,
        "context": data["sequence_length"],
        "datastore": None,
        "k": max(1, data["k"]),
        "checkpoint": state | {"format_version": FORMAT_VERSION, "weights": digest(tensors)},
    }
    return config, {_PREFIX + name: tensor for name, tensor in tensors.items()}


def as_family(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> Written | None:
    """Return a plain decoder as a model of one of the families; None if no family can express it or it retrieves."""
    settings, table = checkpoint.model, tensors["embedding.weight"]
    if settings.retrieves or settings.copy_head.context:
        return None
    try:
        family, config = config_of(settings, checkpoint.settings["data"]["sequence_length"])
    except InputError:
        return None
    ours = dict(tensors)
    if settings.scaled_embeddings:  # families do not scale embeddings: scale the table and untie it
        ours = {"head.weight": table} | ours | {"embedding.weight": table * settings.d_model**0.5}
    return config, NAMES[family].theirs(ours, settings.attention.num_heads)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the BLAKE2b-128 hash of names, types, shapes and bytes; it does not depend on the files."""
    whole = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        whole.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def is_exported(folder: Path) -> bool:
    """True if `export_folder` wrote the folder in this project's own format, not as a model of a family."""
    file = folder / "config.json"
    return file.is_file() and read_object(file).get("model_type") == "retro"


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read an exported folder: its metadata, as `write_exported` expects it, and its tensors by their names in `Retro`.

    If the weights have changed, for example by training in transformers, they get a new fingerprint, and `started_from`
    is the fingerprint of the original checkpoint.

    Raises:
        InputError: the folder has another format, a file is missing, or a weight is not finite.
    """
    state = dict(read_object(folder / "config.json").get("checkpoint") or {})
    version, recorded = state.pop("format_version", None), state.pop("weights", None)
    check_version(folder, version)
    with open_weights(folder) as weights:
        files = sorted(set(weights.files.values()))
    stored = {name: check_finite(folder, name, tensor) for name, tensor in read_tensors(index(files)).items()}
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in stored.items()}
    actual = digest(tensors)
    if actual != recorded:
        state |= {"fingerprint": actual[:16], "started_from": state["fingerprint"]}
    return state, tensors


def _save(tensors: dict[str, Tensor], folder: Path, max_shard_size: str) -> None:
    try:
        from huggingface_hub import save_torch_state_dict
    except ImportError as error:
        raise InputError("an export to a folder needs huggingface_hub: pip install 'retro[transformer]'") from error
    try:
        save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size, metadata={"format": "pt"})
    except ValueError as error:
        raise InputError(f"max_shard_size = {max_shard_size!r}: {error}") from error
    permissions = (folder / "README.md").stat().st_mode
    for file in folder.glob("*.safetensors"):
        file.chmod(permissions)  # safetensors restricts new files to their owner; use the usual permissions
        with open(file, "rb") as written:
            os.fsync(written.fileno())


def _write_tokenizer(checkpoint: Checkpoint, folder: Path, datastore: str, tokenizer: str) -> dict[str, int]:
    """Write the tokenizer's files. Returns the special token ids for config.json."""
    advice = "Use the tokenizer of the training run (--tokenizer, a folder in Hugging Face's format), or a datastore with it (--datastore)."
    if not datastore and not checkpoint.settings["data"]["datastores"]:
        tokenizer = tokenizer or checkpoint.settings.get("imported", {}).get("folder", "")
    if tokenizer:
        copy_tokenizer(Path(tokenizer), folder)
        opened = open_huggingface(tokenizer)
        fits = opened.num_model_tokens <= checkpoint.model.vocab_size
    else:
        store = Path(datastore or checkpoint.folders[0])
        source = store / "tokenizer"
        write_tokenizer(source, folder)
        if template := _chat_template(checkpoint):
            write_bytes(folder / "chat_template.jinja", template.encode())
        opened = Tokenizer.open(source)
        fits = checkpoint.reads(opened.vocab_size)
        if fits and checkpoint.tokenizer not in ("", tokenizer_fingerprint(store)):
            raise InputError(
                f"{source} is another tokenizer than that of {checkpoint.path}: other tokens for the same ids. {advice}"
            )
    if not fits:
        raise InputError(
            f"{tokenizer or source} has {opened.vocab_size} tokens, but {checkpoint.path} was trained with {checkpoint.num_ids}. {advice}"
        )
    ids = {"bos": opened.bos_id, "eos": opened.eos_id, "pad": opened.pad_id}
    if ids["pad"] >= checkpoint.model.vocab_size:  # the import added it, because the tokenizer had none
        ids["pad"] = ids["eos"]
    return {f"{role}_token_id": token_id for role, token_id in ids.items()}


def _chat_template(checkpoint: Checkpoint) -> str:
    """The Jinja template of conversations that a model learned, or was imported with; empty = none."""
    finetuned, imported = (checkpoint.settings.get(name, {}) for name in ("finetune", "imported"))
    learned = finetuned.get("format") == "instructions" and finetuned["template"]
    return learned or imported.get("chat_template", "")
