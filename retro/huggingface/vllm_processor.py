"""Copying from a datastore in vLLM, as a logits processor of its engine.

    vllm serve MODEL --logits-processors retro.huggingface.vllm_processor:CopyingLogitsProcessor \
        --additional-config '{"retro_datastore": "datastores/peps"}'

A processor never sees the logits of a prompt. So a request says how strong copying is: `trust_of` finds it in the `prompt_logprobs` of an
earlier one. A request that does not say it copies little.

`extra_args` of a request (`vllm_xargs` over HTTP):
    retro_trust      from `trust_of`
    copy_strength    0 to 1, factor of the odds of copying; 0 = none
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

from indexing.suffixes.order import LONGEST
from retro.huggingface.logits_processor import DatastoreLogitsProcessor
from retro.inference.rows import Row
from retro.model.copy_switch import START
from retro.model.loss import TokenLosses

TRUST, STRENGTH = "retro_trust", "copy_strength"


@dataclass(frozen=True)
class _Request:
    """A text in the batch; vLLM appends to the list of its output tokens."""

    prompt: Sequence[int]
    output: list[int]
    trust: tuple[float, ...]
    copy_strength: float

    def row(self, processor: DatastoreLogitsProcessor) -> Row:
        """Its last tokens, which decide what is copied."""
        tokens = [*self.prompt[-LONGEST:], *self.output[-LONGEST:]][-LONGEST:]
        return processor.row(np.array(tokens, np.int64), self.trust, self.copy_strength)


class CopyingLogitsProcessor(LogitsProcessor):
    """Mixes the logits of each request with what a datastore says about its next token."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError unless `extra_args` has accepted values."""
        given = sampling_params.extra_args or {}
        strength, trust = given.get(STRENGTH, 1.0), given.get(TRUST, START)
        if not isinstance(strength, int | float) or not 0 <= strength <= 1:
            raise ValueError(f"{STRENGTH} = {strength!r}: accepted are numbers from 0 to 1.")
        if not isinstance(trust, list | tuple) or len(trust) != len(START) or not all(0 <= one <= 1 for one in trust):
            raise ValueError(
                f"{TRUST} = {trust!r}: accepted is what `trust_of` returns, {len(START)} numbers from 0 to 1."
            )

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Open the datastore that `additional_config` names.

        Raises:
            ValueError: it names none.
            InputError: the datastore cannot be opened, or has another tokenizer than the model.
        """
        from transformers import AutoTokenizer

        settings, model = vllm_config.additional_config or {}, vllm_config.model_config
        if not (datastore := settings.get("retro_datastore")):
            raise ValueError(
                "additional_config has no retro_datastore: name a datastore made with the model's tokenizer."
            )
        self._processor = DatastoreLogitsProcessor.open(
            datastore, AutoTokenizer.from_pretrained(model.tokenizer), networks=settings.get("retro_networks", "")
        )
        self._requests: dict[int, _Request] = {}

    def is_argmax_invariant(self) -> bool:
        """Greedy sampling changes too."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Note which requests are in the batch."""
        process_dict_updates(self._requests, batch_update, _new_request)

    def apply(self, logits: Tensor) -> Tensor:
        """Mix the logits [N, V]."""
        if copying := {at: request for at, request in self._requests.items() if request.copy_strength}:
            at = torch.tensor([*copying], device=logits.device)
            rows = [request.row(self._processor) for request in copying.values()]
            logits[at] = self._processor.mix_rows(rows, logits[at]).to(logits.dtype)
        return logits


def _new_request(params: Any, prompt: list[int] | None, output: list[int]) -> _Request | None:
    given = params.extra_args or {}
    trust = tuple(map(float, given.get(TRUST, START)))
    return None if not prompt else _Request(prompt, output, trust, float(given.get(STRENGTH, 1.0)))


def trust_of(processor: DatastoreLogitsProcessor, output: Any) -> list[float]:
    """How strong copying may be after a prompt, for `extra_args` of the next request with it.

    Args:
        processor: opened with the same datastore and networks, without a model.
        output: what vLLM returned for the prompt with `prompt_logprobs = 1` and `copy_strength = 0`.
    """
    tokens, found = np.array(output.prompt_token_ids, np.int64), output.prompt_logprobs[1:]
    log_p = [by_token[token].logprob for token, by_token in zip(tokens[1:].tolist(), found, strict=True)]
    log_top = [max(one.logprob for one in by_token.values()) for by_token in found]
    nats, top = torch.tensor([[-one for one in log_p] + [0.0]]), torch.tensor([[*log_top, 0.0]])
    return [*processor.trust_after(tokens, TokenLosses(nats, top))]
