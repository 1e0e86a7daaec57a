"""Verify an imported decoder: compare its logits with those of `transformers`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from indexing.store.errors import InputError
from retro.batch.inputs import Inputs
from retro.huggingface.import_folder import ImportedDecoder
from retro.model.retro import Retro
from retro.model.shapes import shapes_only

TOLERANCE = 1e-3
"""Largest accepted difference, relative to the largest logit. In deep models float32 rounding causes a hundredth of it;
a wrong option causes far more."""

_TEXT = (
    "The river rises in the hills above the town, and for most of its course it runs through meadows: "
    "3.14 km of them belong to one farm.\n河流发源于小镇上方的山丘。\ndef f(x):\n    return x + 1\n"
)


def has_transformers() -> bool:
    """True if `transformers` is installed."""
    from importlib.util import find_spec

    return find_spec("transformers") is not None


@torch.no_grad()
def verify(base: ImportedDecoder, num_tokens: int = 128) -> tuple[float, float]:
    """Compare logits with those of `transformers`, in float32 on the CPU. Both models are in memory.

    Args:
        base: the imported decoder.
        num_tokens: largest number of tokens in the text.

    Returns:
        the largest difference and the largest logit.

    Raises:
        InputError: the logits differ by more than rounding.
    """
    tokens = torch.from_numpy(_prompt(base, min(num_tokens, base.context)))[None]
    with shapes_only():
        model = Retro(base.settings)
    model.load_state_dict(base.tensors, assign=True)
    ours = model.eval()(Inputs(tokens))
    theirs = _their_model(base.folder)(tokens).logits
    difference, largest = float((ours[..., : theirs.shape[-1]] - theirs).abs().max()), float(theirs.abs().max())
    if not difference <= TOLERANCE * largest:
        raise InputError(
            f"{base.folder}: logits differ from transformers' by up to {difference:.3g}; the largest is {largest:.3g}. The import is "
            "wrong. Please report its config.json."
        )
    return difference, largest


def _their_model(folder: Path) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(folder).float().eval()
    except (StrictDataclassError, OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"{folder}: transformers cannot load this model, so that logits cannot be compared ({reason}). Correct its config.json, or set "
            "--no-verify."
        ) from error


def _prompt(base: ImportedDecoder, num_tokens: int) -> np.ndarray:
    """Return a repeated text as int64 [num_tokens]; without a tokenizer, ids from the whole vocabulary."""
    tokenizer = base.folder / "tokenizer.json"
    if not tokenizer.is_file():
        return np.linspace(0, base.settings.vocab_size - base.added_rows - 1, num_tokens).astype(np.int64)
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(tokenizer)).encode(_TEXT).ids
    return np.resize(np.array(ids, dtype=np.int64), num_tokens)
