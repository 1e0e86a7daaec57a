"""Read a GGUF file: write it as a folder in Hugging Face's format, which `import_folder` reads.

    FILE.gguf ─ header: family, tensors ─ transformers: weights in float32 ─┬─► folder
              └ gguf_tokenizer: tokenizer, chat template ───────────────────┘

Everything that `transformers` would skip without an error (unknown tensors, RoPE scaling) is refused before it reads
the file.
"""

import contextlib
import io
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from indexing.store.errors import InputError
from indexing.store.files import write_json
from retro.huggingface.config_json import Config
from retro.huggingface.gguf_header import Header, read_header
from retro.huggingface.gguf_tokenizer import write_tokenizer
from retro.huggingface.import_folder import WEIGHTS, check_finite

_PARTS = {
    "attn_norm.weight": ("D",),
    "attn_q.weight": ("H·C", "D"),
    "attn_k.weight": ("K·C", "D"),
    "attn_v.weight": ("K·C", "D"),
    "attn_output.weight": ("D", "H·C"),
    "ffn_norm.weight": ("D",),
    "ffn_gate.weight": ("F", "D"),
    "ffn_up.weight": ("F", "D"),
    "ffn_down.weight": ("D", "F"),
}
_LAYERS: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": _PARTS,
    "qwen2": _PARTS | {"attn_q.bias": ("H·C",), "attn_k.bias": ("K·C",), "attn_v.bias": ("K·C",)},
    "qwen3": _PARTS | {"attn_q_norm.weight": ("C",), "attn_k_norm.weight": ("C",)},
}
"""By `general.architecture`: the tensors of a layer, and their shapes. Files of Mistral models name the architecture
llama."""
_OUTER = {"token_embd.weight": ("V", "D"), "output.weight": ("V", "D"), "output_norm.weight": ("D",)}
_HEAD = {"qwen3": 128}  # as transformers assumes
_NOT_READ = ("rope.scaling.type", "expert_count", "attention.sliding_window")
"""Keys that change the function and that `transformers` does not read from these families' files."""
_FOLDER = "Import the model's folder in Hugging Face format instead"
_BYTES_PER_WEIGHT = 4


def write_folder(file: Path, folder: Path) -> str:
    """Write config.json, weights, tokenizer and chat template of a GGUF file to an empty folder.

    Args:
        file: a file of a family of `_LAYERS`, with its tokenizer.
        folder: an existing folder.

    Returns:
        how the file stores the weights, such as `4-bit: Q4_1, Q8_0`.

    Raises:
        InputError: the file is damaged, has no tokenizer, is of another family or has a quantization that cannot be
            read; a package is missing; or the disk has too little space.
    """
    header, stored_as = _checked(file)
    write_tokenizer(file, header.fields, folder)
    num_weights = sum(prod(tensor.shape) for tensor in header.tensors.values())
    needed, free = num_weights * _BYTES_PER_WEIGHT, shutil.disk_usage(folder).free
    if free < 2 * needed:  # the folder, and the imported file
        raise InputError(
            f"{folder.resolve().parent} has {free / 1e9:.2f} GB of free space, and {file} needs {2 * needed / 1e9:.2f} GB for its "
            "weights in float32. Free some space, or write to another disk."
        )
    _check_shapes(file, header)
    from safetensors.torch import save_file

    model = _read_weights(file)
    tensors = {name: check_finite(file, name, tensor).contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    write_json(folder / "config.json", config)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return stored_as


def _checked(file: Path) -> tuple[Header, str]:
    """Read and check a file's header. Returns it, and how the weights are stored."""
    try:
        import accelerate  # noqa: F401  transformers needs it to read the weights
        import transformers  # noqa: F401
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
    except ImportError as error:
        raise InputError(
            f"{file}: a GGUF file needs transformers, gguf and accelerate: pip install 'retro[transformer]'"
        ) from error
    import numpy as np

    header = read_header(file)
    fields, tensors, config = header.fields, header.tensors, Config(file, header.fields)
    if (parts := fields.get("split.count", 1)) not in (0, 1):
        raise InputError(
            f"{file} is one of {parts} parts of a model (split.count). Merge them with llama.cpp's `llama-gguf-split --merge FIRST "
            "OUTPUT`, and name the output."
        )
    family = fields.get("general.architecture")
    if not isinstance(family, str) or family not in _LAYERS:
        config.refuse("general.architecture", ", ".join(_LAYERS) + " (Llama and Mistral, Qwen2, Qwen3)")
    for key in _NOT_READ:
        if fields.get(f"{family}.{key}") not in (None, 0, "none"):
            config.refuse(f"{family}.{key}", f"none. {_FOLDER}")
    for key in ("rope.freq_base", "attention.layer_norm_rms_epsilon"):
        config.number(f"{family}.{key}", 1.0)
    config.integer(f"{family}.context_length")
    layers = config.integer(f"{family}.block_count")
    if missing := next((name for name in _names(layers, family) if name not in tensors), None):
        raise InputError(f"{file} has no tensor {missing}, and its block_count is {layers:,}. Download it again.")
    if unknown := sorted(tensors.keys() - _names(layers, family) - {"output.weight"}):
        raise InputError(f"{file}: tensor {unknown[0]} is unknown for the family {family}. {_FOLDER}.")
    sizes: Counter[Any] = Counter()
    for tensor in tensors.values():
        sizes[GGMLQuantizationType(tensor.kind)] += prod(tensor.shape)
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
    return header, f"{bits}-bit: {', '.join(kind for kind in kinds if kind != 'F32') or 'F32'}"


def _names(layers: int, family: str) -> Iterator[str]:
    """Generate the names of the tensors that a file must have. A wrong number of layers ends at the first missing
    name."""
    yield from ("token_embd.weight", "output_norm.weight")
    for layer in range(layers):
        yield from (f"blk.{layer}.{part}" for part in _LAYERS[family])


def _check_shapes(file: Path, header: Header) -> None:
    """Compare the shapes of all tensors with the sizes that the keys name.

    Raises:
        InputError: they differ, or a size is not a number.
    """
    family, config = header.fields["general.architecture"], Config(file, header.fields)
    width, inner = (config.integer(f"{family}.{key}") for key in ("embedding_length", "feed_forward_length"))
    heads = config.integer(f"{family}.attention.head_count")
    groups = config.integer(f"{family}.attention.head_count_kv", heads)
    rows = len(header.fields["tokenizer.ggml.tokens"])
    sizes = {
        "D": width,
        "F": inner,
        "C": _HEAD.get(family) or config.integer(f"{family}.rope.dimension_count", max(1, width // heads)),
        "V": config.integer(f"{family}.vocab_size", rows),
    }
    sizes |= {"H·C": heads * sizes["C"], "K·C": groups * sizes["C"]}
    if heads % groups:
        config.refuse(f"{family}.attention.head_count_kv", f"a divisor of head_count = {heads}")
    if sizes["V"] < rows:
        config.refuse(f"{family}.vocab_size", f"at least the number of tokens, {rows:,}")
    for name, tensor in header.tensors.items():
        symbols = (_OUTER | _LAYERS[family])[re.sub(r"blk\.\d+\.", "", name)]
        expected = tuple(sizes[symbol] for symbol in symbols)
        if tensor.shape != expected:
            raise InputError(
                f"{file}: {name} has the shape {list(tensor.shape)}, its keys {list(expected)}: {', '.join(symbols)} with "
                f"D = embedding_length, F = feed_forward_length, H = head_count, K = head_count_kv, C = {sizes['C']} per head, "
                f"V = {sizes['V']:,} ids. Download it again."
            )


def _read_weights(file: Path) -> Any:
    """Return the model as `transformers` reads it, in float32."""
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoModelForCausalLM

    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # bars that no setting turns off
            return AutoModelForCausalLM.from_pretrained(file.parent, **source, dtype=torch.float32)
    except (StrictDataclassError, OSError, RuntimeError, ArithmeticError, ValueError, LookupError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{file}: transformers cannot read this file ({reason}). {_FOLDER}.") from error
