"""A small random model as a GGUF file, with a byte-level tokenizer and a chat template."""

from pathlib import Path
from typing import Any

import numpy as np

CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|end|>\n{% endfor %}"
WIDTH, HEAD, FFW, LAYERS = 64, 32, 96, 2
MERGES = ["t h", "th e"]


def write_gguf(
    file: Path, family: str = "llama", *, quantization: str = "F32", leave_out: str = "", **changes: Any
) -> Path:
    """Write the file.

    Args:
        file: the output.
        family: `general.architecture`.
        quantization: of matrices.
        leave_out: tensors and keys that begin with it are left out, if it is not empty.
        changes: values of other keys, with `__` for a point. An array becomes a tensor.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quantize
    from tokenizers import pre_tokenizers

    head = 128 if family == "qwen3" else HEAD  # as transformers assumes
    queries, keys = 2 * head, head
    tokens = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    sizes = {"token_embd.weight": (len(tokens), WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        inner: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (WIDTH,),
            "attn_q.weight": (queries, WIDTH),
            "attn_k.weight": (keys, WIDTH),
            "attn_v.weight": (keys, WIDTH),
            "attn_output.weight": (WIDTH, queries),
            "ffn_norm.weight": (WIDTH,),
            "ffn_gate.weight": (FFW, WIDTH),
            "ffn_up.weight": (FFW, WIDTH),
            "ffn_down.weight": (WIDTH, FFW),
        }
        if family == "qwen2":
            inner |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
        if family == "qwen3":
            inner |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
        sizes |= {f"blk.{layer}.{name}": size for name, size in inner.items()}
    random = np.random.default_rng(0)
    tensors = {name: random.normal(0, 0.3, size).astype(np.float32) for name, size in sizes.items()}
    values: dict[str, Any] = {
        f"{family}.block_count": LAYERS,
        f"{family}.context_length": 128,
        f"{family}.embedding_length": WIDTH,
        f"{family}.feed_forward_length": FFW,
        f"{family}.attention.head_count": 2,
        f"{family}.attention.head_count_kv": 1,
        f"{family}.rope.freq_base": 10_000.0,
        f"{family}.rope.dimension_count": head,
        f"{family}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{family}.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, *[1] * (len(tokens) - 1)],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    for name, value in changes.items():
        (tensors if isinstance(value, np.ndarray) else values)[name.replace("__", ".")] = value
    writer = GGUFWriter(file, family)
    for name, value in values.items():
        if leave_out and name.startswith(leave_out):
            continue
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    kind = GGMLQuantizationType[quantization]
    for name, tensor in tensors.items():
        if leave_out and name.startswith(leave_out):
            continue
        if tensor.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, tensor)
        elif kind == GGMLQuantizationType.Q8_1:  # which the package gguf neither writes nor reads
            writer.add_tensor(name, np.zeros((len(tensor), tensor.shape[1] * 40 // 32), np.uint8), raw_dtype=kind)
        else:
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
