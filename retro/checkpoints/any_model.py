"""A model that text can be scored with: a checkpoint, or any decoder of transformers.

    a checkpoint, a run, a file ──────────────┐
    a folder in Hugging Face's format ────────┼─► open_model ─► Checkpoint ─► load_scorer ─► Retro, or TransformersModel
    a name on the Hugging Face Hub, a .gguf ──┘

A decoder of transformers is a `Checkpoint` without weights: its settings name where transformers finds them. `retro add-retrieval` writes it
as a file with the networks of its copy head alone.
"""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from indexing.progress import during
from indexing.store.artifact import fingerprint
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.tokenization.backends import read_object
from retro.checkpoints.checkpoint import (
    TRANSFORMERS,
    Checkpoint,
    load_model,
    load_weights,
    locate,
    of_state,
    open_checkpoint,
)
from retro.data.settings import DataSettings
from retro.device import Placement
from retro.model.copy_head import CopyHead
from retro.model.copying_model import CopyingModel
from retro.model.datastore_fit import check_tokens
from retro.model.settings import NO_COPY_HEAD, CopyHeadSettings, ModelSettings, RetrievalSettings, updated
from retro.model.transformers_model import TransformersModel

GGUF = ".gguf"
_CONFIG = "config.json"
_OURS = "retro"  # model_type of folders that `retro export` writes
LONGEST_CONTEXT = 2048
"""Tokens that models from elsewhere read at most, unless a setting says otherwise."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def is_of_transformers(path: Path) -> bool:
    """Whether a path names a model that transformers computes: a folder with config.json, a .gguf file, or owner/name on the Hub."""
    if path.suffix == GGUF:
        return path.is_file()
    if path.exists():
        return (path / _CONFIG).is_file() and read_object(path / _CONFIG).get("model_type") != _OURS
    return locate(path) is None and _HUB_NAME.fullmatch(str(path)) is not None


def open_model(path: Path) -> Checkpoint:
    """Open a checkpoint, or a decoder of transformers, which then copies from neighbors and the whole datastore.

    Raises:
        InputError: there is none, a file is damaged, or transformers cannot read the configuration.
    """
    return _reference(path) if is_of_transformers(path) else open_checkpoint(path)


def load_scorer(checkpoint: Checkpoint, placement: Placement) -> CopyingModel:
    """The model of a checkpoint in evaluation mode, to score text with.

    Raises:
        InputError: the weights do not fit the settings, or transformers cannot load them.
    """
    if not checkpoint.of_transformers:
        return load_model(checkpoint, placement.device)
    with during("loading the weights of %s", checkpoint.of_transformers["path"]):
        decoder = _load_decoder(checkpoint, placement)
    head = CopyHead(checkpoint.model.copy_head, checkpoint.model.chunk_length)
    head.initialize()
    if checkpoint.weights:
        load_weights(checkpoint, nn.ModuleDict({"copy_head": head}))
    return TransformersModel(decoder, head.to(placement.device), checkpoint.model).eval()


def for_datastore(checkpoint: Checkpoint, folder: Path | str) -> Checkpoint:
    """A decoder of transformers with the chunk length and all ids of a datastore; other checkpoints as they are.

    Raises:
        InputError: the datastore has another tokenizer than the decoder.
    """
    if not checkpoint.of_transformers:
        return checkpoint
    datastore = Datastore.open(folder)
    check_tokens(datastore, open_tokenizer(checkpoint))
    ids = int(datastore.manifest["vocab_size"])  # with a token for padding that the tokenizer may lack
    changes = {
        "chunk_length": int(datastore.manifest["chunk_length"]),
        "vocab_size": max(checkpoint.model.vocab_size, ids),
    }
    return replace(checkpoint, model=updated(checkpoint.model, changes))


def without_copying(checkpoint: Checkpoint) -> Checkpoint:
    """A decoder of transformers without the sources that it is opened with, to which others are added; other checkpoints as they are."""
    if not checkpoint.of_transformers or checkpoint.weights:
        return checkpoint
    return replace(checkpoint, model=replace(checkpoint.model, copy_head=NO_COPY_HEAD))


def open_tokenizer(checkpoint: Checkpoint) -> Any:
    """The tokenizer of a decoder of transformers.

    Raises:
        InputError: transformers is not installed, or cannot read it.
    """
    return _from_pretrained("AutoTokenizer", checkpoint.of_transformers["path"])


def _reference(path: Path) -> Checkpoint:
    config = _from_pretrained("AutoConfig", str(path))
    text = config.get_text_config()
    length = min(getattr(text, "max_position_embeddings", None) or LONGEST_CONTEXT, LONGEST_CONTEXT)
    model = ModelSettings(
        vocab_size=text.vocab_size,
        chunk_length=1,  # until a datastore is known: `for_datastore`
        retrieval=RetrievalSettings(cca_layers=()),
        copy_head=CopyHeadSettings(context=False, neighbors=True, datastore=True),
    )
    of_transformers = {"path": str(path.resolve() if path.exists() else path), "family": config.model_type}
    settings = {
        "model": asdict(model),
        "data": asdict(DataSettings(sequence_length=length)),
        "train": {"precision": "auto"},
        TRANSFORMERS: of_transformers,
    }
    state = {"step": 0, "tokens": 0, "settings": json.loads(json.dumps(settings, default=str)), "datastores": []}
    return of_state(path, (), (), fingerprint([of_transformers, config.to_dict(), _sizes(path)]), state)


def _sizes(path: Path) -> dict[str, int]:
    """The sizes of the files of a local model: reading gigabytes for a checksum would take longer than most measurements."""
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    return {file.name: file.stat().st_size for file in files if file.is_file()}


def _load_decoder(checkpoint: Checkpoint, placement: Placement) -> Any:
    path = checkpoint.of_transformers["path"]
    dtype = torch.float32 if path.endswith(GGUF) else placement.dtype  # the kernels of a .gguf compute in float32
    decoder = _from_pretrained("AutoModelForCausalLM", path, dtype=dtype)
    if decoder.config.is_encoder_decoder:
        raise InputError(
            f"{checkpoint.path}: the model has an encoder that reads the prompt; only decoders are supported."
        )
    return decoder.to(placement.device)


def _from_pretrained(name: str, path: str, **options: Any) -> Any:
    """Call `from_pretrained` of a class of transformers.

    Raises:
        InputError: transformers is not installed, or cannot read the model.
    """
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            f"{path} is read by the package transformers, which is not installed: pip install 'retro[transformer]'"
        ) from error
    transformers.utils.logging.disable_progress_bar()  # ours says what is loaded
    folder = path
    if path.endswith(GGUF):
        folder, options = str(Path(path).parent), options | {"gguf_file": Path(path).name}
    try:
        return getattr(transformers, name).from_pretrained(folder, **options)
    except Exception as error:  # each reader of files has its own kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise InputError(
            f"{path} is no checkpoint, and transformers cannot read it as a decoder ({reason}). Name a checkpoint, a folder in Hugging "
            "Face's format, a name on its Hub, or a .gguf file."
        ) from error
