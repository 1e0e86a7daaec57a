"""Which device multiplies, and whether it does so in bfloat16. torch is imported where it is used."""


def resolve(device: str) -> str:
    """`auto` is CUDA where there is one, else the CPU; anything else stays as it is."""
    import torch

    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def has_bfloat16(device: str) -> bool:
    """Whether the device multiplies bfloat16 matrices in hardware: CUDA since Ampere, CPUs with AMX or AVX512-BF16."""
    import torch

    if device.startswith("cuda"):
        return bool(torch.cuda.is_bf16_supported())
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
