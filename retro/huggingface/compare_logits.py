"""Are the logits of a base those that `transformers` computes of its folder?"""

import numpy as np
import torch

from indexing.store.errors import InputError
from retro.huggingface.import_folder import Base
from retro.model.retro import Retro

TOLERANCE = 1e-3
"""Of the largest logit. What float32 rounds comes to a hundredth of it in deep models, and an option read wrongly to far more."""

_TEXT = (
    "The river rises in the hills above the town, and for most of its course it runs through meadows: "
    "3.14 km of them belong to one farm.\n河流发源于小镇上方的山丘。\ndef f(x):\n    return x + 1\n"
)


def has_transformers() -> bool:
    """Whether there is something to compare with."""
    from importlib.util import find_spec

    return find_spec("transformers") is not None


@torch.no_grad()
def verify(base: Base, num_tokens: int = 128) -> tuple[float, float]:
    """The largest difference from the logits of `transformers`, in float32 on the CPU, and the largest logit.

    Args:
        base: as it was read; both models are in memory at a time.
        num_tokens: of the text, at most.

    Raises:
        InputError: they differ by more than rounding.
    """
    from transformers import AutoModelForCausalLM

    tokens = torch.from_numpy(_prompt(base, min(num_tokens, base.context)))[None]
    with torch.device("meta"):
        model = Retro(base.settings)
    model.load_state_dict(base.tensors, assign=True)
    ours = model.eval()(tokens)
    theirs = AutoModelForCausalLM.from_pretrained(base.folder).float().eval()(tokens).logits
    difference, largest = float((ours[..., : theirs.shape[-1]] - theirs).abs().max()), float(theirs.abs().max())
    if not difference <= TOLERANCE * largest:
        raise InputError(
            f"{base.folder}: logits differ from transformers' by up to {difference:.3g}, the largest is {largest:.3g}: it is not read "
            "as it was meant. Please report its config.json."
        )
    return difference, largest


def _prompt(base: Base, num_tokens: int) -> np.ndarray:
    """Some text again and again, int64 [num_tokens]; without a tokenizer, ids from all of the table."""
    tokenizer = base.folder / "tokenizer.json"
    if not tokenizer.is_file():
        return np.linspace(0, base.settings.vocab_size - base.added_rows - 1, num_tokens).astype(np.int64)
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(tokenizer)).encode(_TEXT).ids
    return np.resize(np.array(ids, dtype=np.int64), num_tokens)
