"""A prefix as a folder of peft (PREFIX_TUNING) for a model that transformers has, and back.

    peft    prompt_embeddings [P, L·2·G·C]                                 the text is at the positions P, P + 1 …
    here    attention.N.block.prefix.keys.weight, …values… [G, P, C]       the text is at the positions 0, 1 …

Both read keys as they are stored, so keys are rotated by P tokens between the two. Letters as in `model/attention.py`;
L layers.
"""

from dataclasses import replace
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor

from indexing.store.errors import InputError
from indexing.store.files import write_json
from indexing.tokenization.backends import read_object
from retro.adapters.prefix import PREFIX
from retro.checkpoints.checkpoint import Checkpoint
from retro.checkpoints.tensor_files import index, read_tensors, save_tensors
from retro.huggingface.config_json import Config
from retro.huggingface.export import check_new
from retro.huggingface.import_folder import ImportedDecoder, check_finite, read_base
from retro.model.positions import rotate
from retro.model.reader import rotation_at
from retro.model_settings import ModelSettings, updated

CONFIG, WEIGHTS, _TENSOR = "adapter_config.json", "adapter_model.safetensors", "prompt_embeddings"


def write_prefix(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the prefix of a model that is otherwise an imported one, whose folder adapter_config.json names.

    Raises:
        InputError: the folder is not empty, the model has no prefix, is not otherwise the imported one, or peft reads
            prefixes of such models otherwise.
    """
    settings, base = checkpoint.model, checkpoint.settings.get("imported", {}).get("folder", "")
    heads, count = settings.attention, settings.attention.prefix_tokens
    check_new(folder)
    if not count or not base:
        raise InputError(f"{checkpoint.path} has no prefix or was not imported from a folder, as --peft needs.")
    tensors, theirs = read_tensors(index(checkpoint.weights)), read_base(Path(base), settings.chunk_length)
    _check_readable(settings, checkpoint.path)
    prefix = torch.stack([tensors.pop(name) for name in _names(settings)])
    if tensors.keys() != theirs.tensors.keys() or any(not torch.equal(tensors[n], theirs.tensors[n]) for n in tensors):
        raise InputError(f"{checkpoint.path} has other weights than {base}: --peft needs train.weights = 'none'.")
    pairs = _rotated(rearrange(prefix, "(l two) g p c -> l two p g c", two=2), settings, count)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors({_TENSOR: rearrange(pairs, "l two p g c -> p (l two g c)")}, folder / WEIGHTS)
    sizes = {"num_virtual_tokens": count, "num_layers": settings.num_layers, "num_transformer_submodules": 1}
    sizes |= {"num_attention_heads": heads.kv_heads, "token_dim": heads.kv_heads * heads.head_dim}
    kind = {"peft_type": "PREFIX_TUNING", "task_type": "CAUSAL_LM", "inference_mode": True}
    write_json(folder / CONFIG, {**kind, **sizes, "base_model_name_or_path": base})


def with_prefix(base: ImportedDecoder, folder: Path) -> ImportedDecoder:
    """Add the prefix of a folder of peft to its base.

    Raises:
        InputError: the folder has another kind of adapter or one of another model; the message names file and key.
    """
    config, file = adapter_config(folder), folder / WEIGHTS
    config.only("peft_type", "PREFIX_TUNING")
    config.only("prefix_projection", False)
    count, heads = config.integer("num_virtual_tokens"), base.settings.attention
    settings = updated(base.settings, {"attention.prefix_tokens": count})
    _check_readable(settings, base.folder)
    stored = read_tensors(index([file])) if file.is_file() else {}
    shape = [count, settings.num_layers * 2 * heads.kv_heads * heads.head_dim]
    if _TENSOR not in stored or list(stored[_TENSOR].shape) != shape:
        raise InputError(f"{file}: {_TENSOR} must have the shape {shape} for {base.folder}. Name its own base.")
    flat = check_finite(file, _TENSOR, stored[_TENSOR].float())
    pairs = rearrange(flat, "p (l two g c) -> l two p g c", l=settings.num_layers, two=2, g=heads.kv_heads)
    prefix = rearrange(_rotated(pairs, settings, -count), "l two p g c -> (l two) g p c").contiguous()
    return replace(base, settings=settings, tensors=base.tensors | dict(zip(_names(settings), prefix, strict=True)))


def adapter_config(folder: Path) -> Config:
    """The adapter_config.json of a folder of peft."""
    return Config(folder / CONFIG, read_object(folder / CONFIG))


def _check_readable(settings: ModelSettings, where: Path) -> None:
    """Refuse models in which the positions of the prefix have another effect in peft: they are in its table or its
    window."""
    heads = settings.attention
    if heads.positions != "rope" or heads.sliding_window:
        raise InputError(
            f"{where} has model.attention.positions = {heads.positions!r} and sliding_window = {heads.sliding_window}: prefixes of "
            "peft need 'rope' and 0."
        )


def _names(settings: ModelSettings) -> list[str]:
    """The tensors of the prefix: keys and values of each layer."""
    layers = range(settings.num_layers)
    return [f"attention.{layer}.block{PREFIX}{part}.weight" for layer in layers for part in ("keys", "values")]


def _rotated(pairs: Tensor, settings: ModelSettings, distance: int) -> Tensor:
    """Rotate the keys of keys and values [L, 2, P, G, C] by a number of tokens."""
    rotation = rotation_at(settings, torch.full((pairs.shape[2],), distance))
    return torch.stack((rotate(pairs[:, 0], rotation), pairs[:, 1]), dim=1)
