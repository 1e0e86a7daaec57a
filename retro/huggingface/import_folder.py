"""Import a plain decoder from a local folder in Hugging Face's format, and write it as one file.

    config.json ─ families ─► settings ┐
    *.safetensors ─ names ─► tensors ──┴► ImportedDecoder ─ import_base ─► FILE.safetensors, accepted as CHECKPOINT everywhere

The import does not need `transformers` and never unpickles files. Weights are converted to float32, like all weights
here.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from indexing.machine import Precision
from indexing.store.artifact import fingerprint
from indexing.store.errors import InputError
from indexing.store.files import member
from indexing.tokenization.backends import read_object
from indexing.tokenization.installation import open_installed, sentencepiece_file
from indexing.tokenization.metadata import HUGGINGFACE_MODEL
from indexing.tokenization.settings import TokenizerSettings
from retro.checkpoints.any_model import LONGEST_CONTEXT
from retro.checkpoints.single_file import write_exported
from retro.checkpoints.tensor_files import check_size
from retro.data.settings import DataSettings
from retro.huggingface.config_json import Config
from retro.huggingface.families import settings_of
from retro.huggingface.tensor_names import NAMES, Names
from retro.model.retro import Retro
from retro.model.shapes import shapes_only
from retro.model_settings import ModelSettings
from retro.training.settings import TrainSettings

WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TABLES = ("embedding.weight", "head.weight")


@dataclass(frozen=True)
class ImportedDecoder:
    """A decoder read from a folder.

    Attributes:
        folder: the folder.
        family: `model_type` in config.json.
        settings: settings of the decoder.
        tensors: weights by their names in `Retro`, float32.
        context: length of the longest sequence that the decoder supports, in tokens.
        num_ids: ids of the tokenizer, including those added for padding; without a tokenizer, rows of the embedding.
        added_rows: rows added to the tables for ids that the original tables lack; see `add_rows`.
    """

    folder: Path
    family: str
    settings: ModelSettings
    tensors: dict[str, Tensor]
    context: int
    num_ids: int
    added_rows: int


def read_base(folder: Path, chunk_length: int = 64) -> ImportedDecoder:
    """Read a decoder of one of the `families` from a folder.

    Args:
        folder: local folder with config.json, safetensors (one file, or several with an index) and preferably the
            tokenizer.
        chunk_length: `ModelSettings.chunk_length` of a retrieval model built from the decoder.

    Raises:
        InputError: a file is missing, damaged or not supported; the message names file, key or tensor.
    """
    config = Config.open(folder)
    family, settings, context = settings_of(config, chunk_length)
    num_ids = tokenizer_size(folder) or settings.vocab_size
    with open_weights(folder) as weights:
        num_bytes = sum(file.stat().st_size for file in set(weights.files.values()))
        check_size(settings, len(weights.files), num_bytes, config.file)
        if settings.tied_embeddings and _has_another_head(weights, NAMES[family]):
            settings = replace(settings, tied_embeddings=False)
        tensors = _translated(weights, NAMES[family], settings)
    missing = max(0, num_ids - settings.vocab_size)
    if missing:
        settings = replace(settings, vocab_size=num_ids)
        tensors |= {name: add_rows(tensors[name], missing) for name in _TABLES if name in tensors}
    return ImportedDecoder(folder, family, settings, tensors, context, num_ids, missing)


def _has_another_head(weights: "Weights", names: Names) -> bool:
    """True if an output layer is stored that is not the embedding. `transformers` uses it, also if config.json ties the
    two."""
    stored = [name.removeprefix(names.prefix) for name in weights.files]
    head, table = names.of("head.weight")[0], names.of("embedding.weight")[0]
    if head not in stored or table.removeprefix(names.prefix) not in stored:
        return False
    table = table if table in weights.files else table.removeprefix(names.prefix)
    return not torch.equal(weights.read(head), weights.read(table))


def add_rows(table: Tensor, num_rows: int) -> Tensor:
    """Append rows to a table [V, D]; each is the mean of the existing rows.

    The logit of such a row is the mean of all logits, so its probability is at most 1/V (Jensen's inequality), and the
    other probabilities shrink by no more than that. A row of zeros would have the logit 0, which is far above all
    others in GPT-2.
    """
    return torch.cat((table, table.mean(0, keepdim=True).expand(num_rows, -1)))


def tokenizer_size(folder: Path) -> int:
    """Return the number of ids of a folder's tokenizer after `install_tokenizer`; 0 without a tokenizer.

    Raises:
        InputError: the tokenizer cannot be read.
    """
    if (folder / HUGGINGFACE_MODEL).is_file():
        settings = TokenizerSettings(kind="huggingface", path=str(folder))
    elif sentencepiece_file(folder):
        settings = TokenizerSettings(kind="sentencepiece", path=str(folder))
    else:
        return 0
    return open_installed(settings).vocab_size


def import_base(
    base: ImportedDecoder,
    file: Path,
    context: int = 0,
    precision: Precision = "auto",
    chat_template: str = "",
    stored_as: str = "",
) -> None:
    """Write an imported decoder as one file, like an exported checkpoint of step 0 without a datastore.

    Args:
        base: the imported decoder.
        file: output file with the ending `.safetensors`.
        context: context length for scoring and generation in tokens, in whole chunks; 0 = the decoder's, at most 2,048.
        precision: precision of matrix products, `TrainSettings.precision`.
        chat_template: Jinja template of conversations, kept for chat; empty = none.
        stored_as: the quantization of the original weights, for people; empty = none.

    Raises:
        InputError: the file has another ending, or the context is longer than the table of positions or shorter than a
            chunk.
    """
    m = base.settings.chunk_length
    context = (context or min(base.context, LONGEST_CONTEXT)) // m * m
    if not context:
        raise InputError(
            f"context: at most {base.context} tokens, fewer than model.chunk_length = {m}. Set --chunk-length lower."
        )
    base.settings.check_length(context)
    imported = {
        "folder": str(base.folder.resolve()),
        "family": base.family,
        "added_rows": base.added_rows,
        "chat_template": chat_template,
    } | ({"stored_as": stored_as} if stored_as else {})
    settings: dict[str, Any] = {
        "model": asdict(base.settings),
        "data": asdict(DataSettings(sequence_length=context)),
        "train": asdict(TrainSettings(precision=precision)),
        "imported": imported,
    }
    state = {"step": 0, "tokens": 0, "settings": json.loads(json.dumps(settings, default=str)), "datastores": []}
    if base.num_ids != base.settings.vocab_size:
        state["num_ids"] = base.num_ids
    digests = {name: hashlib.blake2b(tensor.numpy().data).hexdigest() for name, tensor in base.tensors.items()}
    state["fingerprint"] = fingerprint({"model": state["settings"]["model"], "tensors": digests})
    write_exported(state, base.tensors, file)


# -------------------------------------------------------------------------------------------------------- safetensors


class Weights:
    """Lazily read tensors of a folder, by name."""

    def __init__(self, files: dict[str, Path], stack: contextlib.ExitStack) -> None:
        self.files, self._stack, self._opened = files, stack, dict[Path, Any]()

    def read(self, name: str) -> Tensor:
        """Read a tensor as float32.

        Raises:
            InputError: its type is not a 16-, 32- or 64-bit float, or a value is not finite.
        """
        file = self.files[name]
        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(safe_open(file, "pt"))
        tensor: Tensor = self._opened[file].get_tensor(name)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise InputError(
                f"{file}: {name} has the type {tensor.dtype}; accepted: float32, bfloat16, float16, float64."
            )
        return check_finite(file, name, tensor.float())


def check_finite(file: Path, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of a file as it is.

    Raises:
        InputError: a value is NaN or infinite.
    """
    if not torch.isfinite(tensor).all():
        number = int((~torch.isfinite(tensor)).sum())
        raise InputError(
            f"{file}: {name} has {number:,} values that are NaN or infinite; accepted: finite numbers. Copy the file again."
        )
    return tensor


@contextlib.contextmanager
def open_weights(folder: Path) -> Iterator[Weights]:
    """Open the safetensors files of a folder.

    Raises:
        InputError: there are no safetensors files, or one is missing or damaged.
    """
    if (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    elif (folder / _INDEX).is_file():
        named = read_object(folder / _INDEX).get("weight_map")
        in_folder = isinstance(named, dict) and all("/" not in str(name) != ".." for name in named.values())
        if not isinstance(named, dict) or not named or not in_folder:
            raise InputError(f"{folder / _INDEX}: weight_map must map every tensor to a file in the same folder.")
        files = [member(folder, name) for name in sorted(set(map(str, named.values())))]
    elif pickled := sorted(folder.glob("*.bin")):
        raise InputError(
            f"{pickled[0]} is a pickle file, which is not supported. Convert it to safetensors with transformers: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(…)."
        )
    else:
        raise InputError(f"{folder} has neither {WEIGHTS} nor {_INDEX}.")
    file_of: dict[str, Path] = {}
    for file in files:
        if not file.is_file():
            raise InputError(f"{file} is missing, but {folder / _INDEX} names it.")
        try:
            with safe_open(file, "pt") as opened:
                file_of |= dict.fromkeys(opened.keys(), file)
        except SafetensorError as error:
            raise InputError(f"{file} is damaged or not a safetensors file ({error}). Copy it again.") from error
    with contextlib.ExitStack() as stack:
        yield Weights(file_of, stack)


def _translated(weights: Weights, names: Names, settings: ModelSettings) -> dict[str, Tensor]:
    """Return the tensors of a decoder with these settings, by their names in `Retro`.

    Raises:
        InputError: a tensor is missing, unknown or has another shape.
    """
    where = next(iter(weights.files.values())).parent
    with shapes_only():
        shapes = {name: tensor.shape for name, tensor in Retro(settings).state_dict().items()}
    read, used = {}, set()
    for name, shape in shapes.items():
        theirs = names.of(name)[0]
        # A folder that was saved without an output layer has no prefix.
        stored = theirs if theirs in weights.files else theirs.removeprefix(names.prefix)
        if stored not in weights.files:
            raise InputError(f"{where} has no tensor {theirs}, but its config.json requires it.")
        used.add(stored)
        tensor = names.ours(name, weights.read(stored), settings.attention.num_heads)
        if tensor.shape != shape:
            problem = f"gives {name} the shape {list(tensor.shape)}, its config.json {list(shape)}"
            raise InputError(f"{weights.files[stored]}: {stored} {problem}.")
        read[name] = tensor.contiguous()
    tied = {f"{names.head}.weight"} if settings.tied_embeddings else set()
    foreign = [name for name in weights.files if name not in used | tied and not names.is_ignored(name)]
    if foreign:
        raise InputError(f"{weights.files[foreign[0]]}: tensor {foreign[0]} is unknown for the family of {where.name}.")
    return read
