"""A model that text can be scored with: a checkpoint, or any decoder of transformers.

    a checkpoint, a run, a file ──────────────┐
    a folder in Hugging Face's format ────────┼─► open_model ─► Checkpoint ─► load_scorer ─► Retro, or TransformersModel
    a name on the Hugging Face Hub, a .gguf ──┤
    networks fitted to one of these ──────────┘

A decoder of transformers is a `Checkpoint` without weights: its settings name where transformers finds them.
`retro add-retrieval` writes the networks of its copy head alone (`network_file.py`), with the name of the model.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch

from indexing.progress import during
from indexing.store.artifact import fingerprint
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.remote import absolute, local_folder
from indexing.store.retrieval_set import tokenizer_fingerprint
from indexing.tokenization.backends import read_object
from indexing.tokenization.metadata import HUGGINGFACE_MODEL, MODEL
from indexing.tokenization.settings import TokenizerSettings
from retro.checkpoints.checkpoint import (
    TRANSFORMERS,
    Checkpoint,
    load_model,
    locate,
    of_state,
    open_checkpoint,
)
from retro.copying.head import CopyHead, open_networks
from retro.copying.model import CopyingModel
from retro.copying.network_file import ACCEPTED, has_networks, write_networks
from retro.copying.sources import SOURCES, sources_of
from retro.copying.transformers_model import TransformersModel
from retro.data.settings import DataSettings
from retro.device import Placement
from retro.model.datastore_fit import check_tokens
from retro.model_settings import NO_COPY_HEAD, CopyHeadSettings, ModelSettings, RetrievalSettings, updated

GGUF = ".gguf"
_CONFIG = "config.json"
_OURS = "retro"  # model_type of folders that `retro export` writes
LONGEST_CONTEXT = 2048
"""Tokens that models from elsewhere read at most, unless a setting says otherwise."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def is_of_transformers(path: Path) -> bool:
    """Whether a path names a model that transformers computes: a folder with config.json, a .gguf file, or owner/name
    on the Hub."""
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
    if has_networks(path):
        return _fitted(path)
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
    copies = checkpoint.model.copy_head
    head = CopyHead(copies.names, checkpoint.model.chunk_length, sources_of(copies))
    head.initialize()
    if checkpoint.weights:
        head.load_state_dict(open_networks(checkpoint.path).weights)
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
    """A decoder of transformers without the sources that it is opened with, to which others are added; other
    checkpoints as they are."""
    if not checkpoint.of_transformers or checkpoint.weights:
        return checkpoint
    return replace(checkpoint, model=replace(checkpoint.model, copy_head=NO_COPY_HEAD))


def open_tokenizer(checkpoint: Checkpoint) -> Any:
    """The tokenizer of a decoder of transformers.

    Raises:
        InputError: transformers is not installed, or cannot read it.
    """
    return _from_pretrained("AutoTokenizer", checkpoint.of_transformers["path"])


def tokenizer_settings(checkpoint: Checkpoint) -> TokenizerSettings:
    """The settings with which a datastore gets the tokenizer of a model.

    Raises:
        InputError: its files are not on this machine, or are not of a kind that datastores have.
    """
    folders = [
        checkpoint.settings.get("imported", {}).get("folder", ""),
        checkpoint.of_transformers.get("path", ""),
        *(str(local_folder(datastore) / "tokenizer") for datastore in checkpoint.settings["data"]["datastores"]),
    ]
    for folder in filter(None, folders):
        for kind, name in _TOKENIZERS.items():
            if (file := Path(folder) / name).is_file():
                return TokenizerSettings(kind=kind, path=str(file))
    raise InputError(
        f"{checkpoint.path}: its tokenizer ({' or '.join(_TOKENIZERS.values())}) is in none of: "
        f"{', '.join(filter(None, folders)) or 'no folder is known'}. Set tokenizer.kind and tokenizer.path."
    )


_TOKENIZERS: dict[Literal["huggingface", "sentencepiece"], str] = {
    "huggingface": HUGGINGFACE_MODEL,
    "sentencepiece": MODEL,
}
"""Kinds of tokenizers that datastores copy, and their files."""


def for_tokens_of(checkpoint: Checkpoint, datastore: Datastore) -> Checkpoint:
    """A model for the tokens of a datastore, as `for_datastore`; its chunks may have another length.

    Raises:
        InputError: the datastore has another tokenizer than the model.
    """
    if checkpoint.of_transformers:
        return for_datastore(checkpoint, datastore.folder)
    sizes = {"vocab_size": datastore.manifest["vocab_size"], "chunk_length": checkpoint.model.chunk_length}
    checkpoint.check_fits(sizes, datastore.folder, tokenizer=tokenizer_fingerprint(datastore.folder))
    return checkpoint


def write_fitted(
    checkpoint: Checkpoint, head: CopyHead, data: DataSettings, datastore: Datastore, fit: Mapping[str, Any], file: Path
) -> None:
    """Write the networks of a decoder of transformers as a safetensors file that `open_model` opens.

    Args:
        checkpoint: the decoder, for the datastore.
        head: with the networks.
        data: with which they were fitted; its first datastore is the one that they were fitted to.
        datastore: the same, opened.
        fit: numbers about the fit.
        file: to write.
    """
    decoder, manifest = checkpoint.of_transformers, datastore.manifest
    about = {
        "model": {
            **decoder,
            "vocab_size": checkpoint.model.vocab_size,
            "fingerprint": checkpoint.started_from or checkpoint.fingerprint,
        },
        "datastore": {
            "path": absolute(data.datastores[0]),
            "fingerprint": datastore.built,
            "tokenizer": tokenizer_fingerprint(datastore.folder),
            "num_ids": int(manifest["vocab_size"]),
            "chunk_length": int(manifest["chunk_length"]),
        },
        "data": {name: getattr(data, name) for name in _DATA},
        "fit": dict(fit),
    }
    write_networks(file, about, head.state_dict())


def _fitted(file: Path) -> Checkpoint:
    """The decoder that a file of `write_fitted` was made for, with the networks of the file."""
    about, identity, weights = open_networks(file)
    parts = {name: _section(file, about, name, kinds) for name, kinds in _SECTIONS.items()}
    decoder, datastore = parts["model"], parts["datastore"]
    sources = {name.partition(".")[0] for name in weights}
    model = _settings(decoder["vocab_size"], datastore["chunk_length"], sources)
    data = DataSettings(datastores=(datastore["path"],), **parts["data"])
    known = {
        "datastores": [datastore["fingerprint"]],
        "num_ids": datastore["num_ids"],
        "tokenizer": datastore["tokenizer"],
        "started_from": decoder["fingerprint"],
    }
    of_transformers = {name: decoder[name] for name in ("path", "family")}
    return replace(_checkpoint(file, model, data, of_transformers, identity, known), weights=(file,))


_DATA = {"sequence_length": int, "k": int, "neighbor_source": str, "max_overlap": float, "seed": int}
_SECTIONS: dict[str, dict[str, type]] = {
    "model": {"path": str, "family": str, "vocab_size": int, "fingerprint": str},
    "datastore": {"path": str, "fingerprint": str, "tokenizer": str, "num_ids": int, "chunk_length": int},
    "data": _DATA,
}
"""The keys about fitted networks that are needed to open them, and their types."""


def _section(file: Path, about: Mapping[str, Any], name: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    """A section about fitted networks; raises InputError if a key is missing or of another type."""
    section = about.get(name)
    for key, kind in kinds.items():
        value = section.get(key) if isinstance(section, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool):
            found = "is missing" if value is None else f"is {value!r:.50}"
            raise InputError(f"{file}: {name}.{key} {found}, it must be of the type {kind.__name__}. {ACCEPTED}")
    assert isinstance(section, dict)  # no section has no keys
    return {key: section[key] for key in kinds}


def _reference(path: Path) -> Checkpoint:
    config = _from_pretrained("AutoConfig", str(path))
    text = config.get_text_config()
    length = min(getattr(text, "max_position_embeddings", None) or LONGEST_CONTEXT, LONGEST_CONTEXT)
    # A chunk length of 1 until a datastore is known: `for_datastore`.
    model = _settings(text.vocab_size, 1, [source.name for source in SOURCES if source.of_retrieval])
    of_transformers = {"path": str(path.resolve() if path.exists() else path), "family": config.model_type}
    identity = fingerprint([of_transformers, config.to_dict(), _sizes(path)])
    return _checkpoint(path, model, DataSettings(sequence_length=length), of_transformers, identity, {"datastores": []})


def _settings(vocab_size: int, chunk_length: int, names: Collection[str]) -> ModelSettings:
    """Settings of a decoder that only copies, from the sources with these names: all of them are added to it."""
    return ModelSettings(
        vocab_size=vocab_size,
        chunk_length=chunk_length,
        retrieval=RetrievalSettings(cca_layers=()),
        copy_head=CopyHeadSettings(
            **{source.name: source.name in names for source in SOURCES}, context_added="context" in names
        ),
    )


def _checkpoint(
    path: Path,
    model: ModelSettings,
    data: DataSettings,
    of_transformers: dict[str, str],
    identity: str,
    known: Mapping[str, Any],
) -> Checkpoint:
    """A decoder of transformers as a checkpoint, with what else is known of it."""
    settings = {
        "model": asdict(model),
        "data": asdict(data),
        "train": {"precision": "auto"},
        TRANSFORMERS: of_transformers,
    }
    state = {"step": 0, "tokens": 0, "settings": json.loads(json.dumps(settings, default=str)), **known}
    return of_state(path, (), (), identity, state)


def _sizes(path: Path) -> dict[str, int]:
    """The sizes of the files of a local model: reading gigabytes for a checksum would take longer than most
    measurements."""
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
