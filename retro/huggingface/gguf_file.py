"""Read a GGUF file: write it as a folder in Hugging Face's format, which `import_folder` reads.

    FILE.gguf ─ gguf: family, tensors ─ transformers: weights in float32 ─┬─► folder
              └ gguf_tokenizer: tokenizer, chat template ─────────────────┘

Everything that `transformers` would skip without an error (unknown tensors, RoPE scaling) is refused before it reads the file.
"""

import contextlib
import io
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from indexing.store.errors import InputError
from indexing.store.files import write_json
from retro.huggingface.gguf_tokenizer import write_tokenizer
from retro.huggingface.import_folder import WEIGHTS, check_finite

_LAYER = (
    *(f"attn_{part}.weight" for part in ("norm", "q", "k", "v", "output")),
    *(f"ffn_{part}.weight" for part in ("norm", "gate", "up", "down")),
)
_ADDED = {
    "llama": (),
    "qwen2": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "qwen3": ("attn_q_norm.weight", "attn_k_norm.weight"),
}
"""By `general.architecture`: the other tensors of a layer. Files of Mistral models name the architecture llama."""
_NOT_READ = ("rope.scaling.type", "expert_count", "attention.sliding_window")
"""Keys that change the function and that `transformers` does not read from these families' files."""
_FOLDER = "Import the model's folder in Hugging Face format instead"
_BYTES_PER_WEIGHT = 4


def write_folder(file: Path, folder: Path) -> str:
    """Write config.json, weights, tokenizer and chat template of a GGUF file to an empty folder.

    Args:
        file: a file of a family of `_ADDED`, with its tokenizer.
        folder: an existing folder.

    Returns:
        how the file stores the weights, such as `4-bit: Q4_1, Q8_0`.

    Raises:
        InputError: the file is damaged, has no tokenizer, is of another family or has a quantization that cannot be read; a
            package is missing; or the disk has too little space.
    """
    fields, stored_as, num_weights = _checked(file)
    write_tokenizer(file, fields, folder)
    needed, free = num_weights * _BYTES_PER_WEIGHT, shutil.disk_usage(folder).free
    if free < 2 * needed:  # the folder, and the imported file
        raise InputError(
            f"{folder.resolve().parent} has {free / 1e9:.2f} GB of free space, and {file} needs {2 * needed / 1e9:.2f} GB for its "
            "weights in float32. Free some space, or write to another disk."
        )
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # bars that no setting turns off
        model = AutoModelForCausalLM.from_pretrained(file.parent, **source, dtype=torch.float32)
    tensors = {name: check_finite(file, name, tensor).contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    write_json(folder / "config.json", config)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return stored_as


def _checked(file: Path) -> tuple[dict[str, Any], str, int]:
    """Check a file's header. Returns its keys and values, how the weights are stored, and their number."""
    try:
        import accelerate  # noqa: F401  transformers needs it to read the weights
        import transformers  # noqa: F401
        from gguf import GGML_QUANT_SIZES, GGUFReader, dequantize
    except ImportError as error:
        raise InputError(
            f"{file}: a GGUF file needs transformers, gguf and accelerate: pip install 'retro[transformer]'"
        ) from error
    import numpy as np

    with open(file, "rb") as opened:
        if opened.read(4) != b"GGUF":
            raise InputError(f"{file} is not a GGUF file: it does not begin with GGUF.")
    try:
        reader = GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise InputError(f"{file}, {file.stat().st_size:,} bytes, is cut or damaged. Download it again.") from error

    def refuse(key: str, accepted: str) -> NoReturn:
        raise InputError(f"{file}: {key} is {fields.get(key, 'missing')!r}; accepted: {accepted}.")

    if (parts := fields.get("split.count", 1)) != 1:
        raise InputError(
            f"{file} is one of {parts} parts of a model (split.count). Merge them with llama.cpp's `llama-gguf-split --merge FIRST "
            "OUTPUT`, and name the output."
        )
    family = fields.get("general.architecture")
    if family not in _ADDED:
        refuse("general.architecture", ", ".join(_ADDED) + " (Llama and Mistral, Qwen2, Qwen3)")
    for key in _NOT_READ:
        if fields.get(f"{family}.{key}") not in (None, 0, "none"):
            refuse(f"{family}.{key}", f"none. {_FOLDER}")
    sizes: Counter[Any] = Counter()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type] += int(tensor.n_elements)
    names, layers = {tensor.name for tensor in reader.tensors}, range(fields.get(f"{family}.block_count", 0))
    required = {f"blk.{layer}.{part}" for layer in layers for part in (*_LAYER, *_ADDED[family])}
    required |= {"token_embd.weight", "output_norm.weight"}
    if unknown := sorted(names - required - {"output.weight"}):
        raise InputError(f"{file}: tensor {unknown[0]} is unknown for the family {family}. {_FOLDER}.")
    if missing := sorted(required - names):
        raise InputError(f"{file} has no tensor {missing[0]}. Download it again.")
    for kind in sizes:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            raise InputError(
                f"{file}: weights of the type {kind.name} cannot be read by the package gguf. Name a file with another quantization, such as "
                "Q4_K_M or Q8_0."
            ) from error
    kinds = [kind.name for kind, _ in sizes.most_common()]
    bits = re.findall(r"\d+", kinds[0])[0]
    stored_as = f"{bits}-bit: {', '.join(kind for kind in kinds if kind != 'F32') or 'F32'}"
    return fields, stored_as, sum(sizes.values())
