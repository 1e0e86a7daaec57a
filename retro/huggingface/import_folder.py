"""A local folder in Hugging Face's format: config.json and safetensors in, a plain decoder of ours out; and into one file.

    config.json ─ families ─► settings ┐
    *.safetensors ─ names ─► tensors ──┴► Base ─ import_base ─► FILE.safetensors, which serves as CHECKPOINT everywhere

Nothing of `transformers` is used, and nothing is unpickled. Weights become float32, as all weights here are.
"""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from indexing.device import Precision
from indexing.store.artifact import fingerprint
from indexing.store.errors import InputError
from indexing.tokenization.backends import read_object
from indexing.tokenization.tokenizer import (
    HUGGINGFACE_MODEL,
    SENTENCEPIECE_MODEL,
    TokenizerSettings,
    install_tokenizer,
    read_meta,
)
from retro.checkpoints.single_file import write_exported
from retro.data.settings import DataSettings
from retro.huggingface.config_json import Config
from retro.huggingface.families import settings_of
from retro.huggingface.tensor_names import NAMES, Names
from retro.model.retro import Retro
from retro.model.settings import ModelSettings
from retro.training.settings import TrainSettings

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LONGEST_CONTEXT = 2048
_TABLES = ("embedding.weight", "head.weight")


@dataclass(frozen=True)
class Base:
    """A decoder that was read from a folder.

    Attributes:
        folder: where it lies.
        family: its `model_type`.
        settings: of the decoder.
        tensors: its weights by our names, float32.
        context: tokens of the longest sequence that it was made for.
        num_ids: ids of its tokenizer, those added for padding included; rows of its tables if it comes without one.
        added_rows: rows of the tables that stand for such ids: see `add_rows`.
    """

    folder: Path
    family: str
    settings: ModelSettings
    tensors: dict[str, Tensor]
    context: int
    num_ids: int
    added_rows: int


def read_base(folder: Path, chunk_length: int = 64) -> Base:
    """Read a folder with a decoder of one of the `families`.

    Args:
        folder: a local one, with config.json, safetensors (whole or with an index) and, it should be, the tokenizer.
        chunk_length: `ModelSettings.chunk_length`, for a retriever that is made of it.

    Raises:
        InputError: a file is missing or damaged, or says what our decoder cannot be; it names file, key or tensor.
    """
    config = Config.open(folder)
    family, settings, context = settings_of(config, chunk_length)
    num_ids = tokenizer_size(folder) or settings.vocab_size
    with open_weights(folder) as weights:
        tensors = _translated(weights, NAMES[family], settings)
    missing = max(0, num_ids - settings.vocab_size)
    if missing:
        settings = replace(settings, vocab_size=num_ids)
        tensors |= {name: add_rows(tensors[name], missing) for name in _TABLES if name in tensors}
    return Base(folder, family, settings, tensors, context, num_ids, missing)


def add_rows(table: Tensor, number: int) -> Tensor:
    """A table [V, D] with more rows, each the mean of all that it has.

    The logit of such a row is the mean of all logits, so its probability is at most that of one token out of V that are equally
    likely (Jensen's inequality), and the others' shrink by no more. A row of zeros would have the logit 0, which in GPT-2 is far
    above all others.
    """
    return torch.cat((table, table.mean(0, keepdim=True).expand(number, -1)))


def tokenizer_size(folder: Path) -> int:
    """Ids of a folder's tokenizer, as a datastore has it (`install_tokenizer`); 0 where there is none.

    Raises:
        InputError: it cannot be read.
    """
    if (folder / HUGGINGFACE_MODEL).is_file():
        settings = TokenizerSettings(kind="huggingface", path=str(folder))
    elif (folder / SENTENCEPIECE_MODEL).is_file():
        settings = TokenizerSettings(kind="sentencepiece", path=str(folder))
    else:
        return 0
    with tempfile.TemporaryDirectory() as installed:
        install_tokenizer(settings, Path(installed))
        return read_meta(Path(installed)).vocab_size


def import_base(base: Base, file: Path, context: int = 0, precision: Precision = "auto") -> None:
    """Write a base as one file, as `checkpoint.export` writes a checkpoint: of step 0, and of no datastore.

    Args:
        base: what was read.
        file: with the ending `.safetensors`.
        context: tokens that it sees at most in scoring and generation, in whole chunks; 0 = what it was made for, up to 2,048.
        precision: of matrix products, `TrainSettings.precision`.

    Raises:
        InputError: the file has another ending, or the context is longer than the table of positions or shorter than a chunk.
    """
    m = base.settings.chunk_length
    context = (context or min(base.context, _LONGEST_CONTEXT)) // m * m
    if not context:
        raise InputError(f"context: {base.context} tokens at most, fewer than model.chunk_length = {m}: set it lower.")
    base.settings.check_length(context)
    told = {"folder": str(base.folder.resolve()), "family": base.family, "added_rows": base.added_rows}
    settings: dict[str, Any] = {
        "model": asdict(base.settings),
        "data": asdict(DataSettings(sequence_length=context)),
        "train": asdict(TrainSettings(precision=precision)),
        "imported": told,
    }
    state = {"step": 0, "tokens": 0, "settings": json.loads(json.dumps(settings, default=str)), "datastores": []}
    if base.num_ids != base.settings.vocab_size:
        state["num_ids"] = base.num_ids
    digests = {name: hashlib.blake2b(tensor.numpy().data).hexdigest() for name, tensor in base.tensors.items()}
    state["fingerprint"] = fingerprint({"model": state["settings"]["model"], "tensors": digests})
    write_exported(state, base.tensors, file)


# -------------------------------------------------------------------------------------------------------- safetensors


class Weights:
    """The tensors of a folder by name, read when they are asked for."""

    def __init__(self, files: dict[str, Path], stack: contextlib.ExitStack) -> None:
        self.files, self._stack, self._opened = files, stack, dict[Path, Any]()

    def read(self, name: str) -> Tensor:
        """One tensor as float32.

        Raises:
            InputError: it holds something else than numbers of 16, 32 or 64 bits.
        """
        file = self.files[name]
        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(safe_open(file, "pt"))
        tensor: Tensor = self._opened[file].get_tensor(name)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise InputError(
                f"{file}: {name} is of type {tensor.dtype}; accepted: float32, bfloat16, float16, float64."
            )
        return tensor.float()


@contextlib.contextmanager
def open_weights(folder: Path) -> Iterator[Weights]:
    """The safetensors of a folder.

    Raises:
        InputError: there are none, one of them is missing or damaged, or they hold two of one name.
    """
    if (folder / _WEIGHTS).is_file():
        files = [folder / _WEIGHTS]
    elif (folder / _INDEX).is_file():
        named = read_object(folder / _INDEX).get("weight_map")
        if not isinstance(named, dict) or not all(Path(str(name)).name == name for name in named.values()):
            raise InputError(f"{folder / _INDEX}: weight_map must name the file of every tensor, beside it.")
        files = [folder / name for name in sorted(set(named.values()))]
    elif pickled := sorted(folder.glob("*.bin")):
        raise InputError(
            f"{pickled[0]} is pickled, and nothing is unpickled here. With transformers, "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(…) writes it as safetensors."
        )
    else:
        raise InputError(f"{folder} holds neither {_WEIGHTS} nor {_INDEX}.")
    lying: dict[str, Path] = {}
    for file in files:
        if not file.is_file():
            raise InputError(f"{file} is missing: {folder / _INDEX} names it.")
        try:
            with safe_open(file, "pt") as opened:
                lying |= dict.fromkeys(opened.keys(), file)
        except SafetensorError as error:
            raise InputError(f"{file} is not a whole safetensors file ({error}). Copy it again.") from error
    with contextlib.ExitStack() as stack:
        yield Weights(lying, stack)


def _translated(weights: Weights, names: Names, settings: ModelSettings) -> dict[str, Tensor]:
    """The tensors of a decoder with these settings.

    Raises:
        InputError: one is missing, has another shape, or there is one more.
    """
    where = next(iter(weights.files.values())).parent
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Retro(settings).state_dict().items()}
    read, used = {}, set()
    for name, shape in shapes.items():
        theirs = names.of(name)[0]
        stored = (
            theirs if theirs in weights.files else theirs.removeprefix(names.prefix)
        )  # saved without an output layer
        if stored not in weights.files:
            raise InputError(f"{where} has no tensor {theirs}, which its config.json asks for.")
        used.add(stored)
        tensor = names.ours(name, weights.read(stored), settings.attention.num_heads)
        if tensor.shape != shape:
            found = f"gives {name} the shape {list(tensor.shape)}, its config.json {list(shape)}"
            raise InputError(f"{weights.files[stored]}: {stored} {found}.")
        read[name] = tensor.contiguous()
    tied = {f"{names.head}.weight"} if settings.tied_embeddings else set()
    foreign = [name for name in weights.files if name not in used | tied and not names.is_ignored(name)]
    if foreign:
        raise InputError(f"{weights.files[foreign[0]]}: {foreign[0]} is a weight that no {where.name} of ours has.")
    return read
