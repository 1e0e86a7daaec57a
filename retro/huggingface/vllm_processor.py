"""Copying from a datastore in vLLM, as a plugin that vLLM finds (entry point group `vllm.logits_processors`).

    vllm serve MODEL --additional-config '{"retro_datastore": "datastores/peps"}'

Without `retro_datastore` the plugin has no effect: it opens and imports nothing, and changes no logits.

vLLM gives a processor no logits of the prompt. So the strength of copying is an argument of the request: `trust_of`
computes it from the `prompt_logprobs` of an earlier one. A request without it copies little.

`extra_args` of a request (`vllm_xargs` over HTTP):
    retro_trust      from `trust_of`
    copy_strength    0 to 1, factor of the odds of copying; 0 = none

vLLM has two model runners, each with its own interface, and requires that a plugin is of the one that runs: version 2
on GPUs, version 1 where Triton is missing, as on most CPUs. So the class implements both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor as Version1
from vllm.v1.sample.logits_processor import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as Version2

from indexing.store.errors import InputError
from indexing.suffixes.order import LONGEST
from retro.batch.loss import TokenLosses
from retro.copying.rows import Row
from retro.copying.switch import RETRIEVAL, checked_trust, is_fraction

if TYPE_CHECKING:  # it imports transformers, for which engines without a datastore would wait
    from retro.huggingface.logits_processor import DatastoreLogitsProcessor

DATASTORE, NETWORKS = "retro_datastore", "retro_networks"
TRUST, STRENGTH = "retro_trust", "copy_strength"
_OURS = "retro_"


@dataclass
class _Request:
    """A text in the batch. Version 1 has its tokens, and appends to the list of its output. `num_prompt` is the number of
    tokens before the first logits; `is_known` is that of `Row`."""

    trust: tuple[float, ...]
    copy_strength: float
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    num_prompt: int | None = None
    is_known: bool | None = None

    def last_tokens(self) -> np.ndarray:
        """Its last tokens, which decide what is copied."""
        return np.array([*self.prompt[-LONGEST:], *self.output[-LONGEST:]][-LONGEST:], np.int64)


class CopyingLogitsProcessor(Version1, Version2):
    """Mix copying from a datastore into the logits of each request."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError unless `extra_args` has accepted values."""
        _new_request(sampling_params)

    def __init__(self, vllm_config: Any, device_or_states: Any, is_pin_memory: bool = False) -> None:
        """Open the datastore that `additional_config` names, if it does.

        Args:
            vllm_config: of the engine.
            device_or_states: the device (version 1), or the tokens of all requests (version 2).
            is_pin_memory: of version 1.

        Raises:
            InputError: a setting of the plugin is not accepted; the datastore cannot be opened, or has another
                tokenizer than the model; or the engine would mix twice, or without the last tokens.
        """
        self._processor = _open(vllm_config, version=1 if isinstance(device_or_states, torch.device) else 2)
        self._states = device_or_states
        self._requests: dict[int, _Request] = {}

    # --- version 1: requests by their row in the batch ----------------------------------------------------------------

    def is_argmax_invariant(self) -> bool:
        """Greedy sampling changes too."""
        return self._processor is None

    def update_state(self, batch_update: Any) -> None:
        """Note which requests are in the batch."""
        if self._processor is not None:
            process_dict_updates(self._requests, batch_update, _new_request)

    # --- version 2: requests by their slot; a request has a row for each token of a draft -----------------------------

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Note the request of a slot; False = its logits do not change."""
        self._requests.pop(req_idx, None)
        if self._processor is None or not (request := _new_request(sampling_params)).copy_strength:
            return False
        self._requests[req_idx] = request
        return True

    # --- both ---------------------------------------------------------------------------------------------------------

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """Mix the logits [N, V]."""
        if self._processor is None or not self._requests:
            return logits
        if ctx is None:
            texts = [
                (row, request, request.last_tokens(), len(request.prompt) + len(request.output))
                for row, request in self._requests.items()
                if request.copy_strength
            ]
        else:
            slots, last_tokens = ctx.expanded_idx_mapping.tolist(), _last_tokens(self._states, ctx)
            texts = [
                (row, self._requests[slot], last_tokens[row], last + 1)
                for row, (slot, last) in enumerate(zip(slots, ctx.pos.tolist(), strict=True))
                if slot in self._requests
            ]
        if texts:
            at = torch.tensor([row for row, *_ in texts], device=logits.device)
            rows = [self._row(request, tokens, num_tokens) for _, request, tokens, num_tokens in texts]
            logits[at] = self._processor.mix_rows(rows, logits[at]).to(logits.dtype)
            for (_, request, *_), row in zip(texts, rows, strict=True):
                request.is_known = row.is_known
        return logits

    def _row(self, request: _Request, last: np.ndarray, num_tokens: int) -> Row:
        """The text of a request, of `num_tokens` tokens, for `mix_rows`."""
        assert self._processor is not None
        if request.num_prompt is None:
            request.num_prompt = num_tokens
        return self._processor.row(
            last,
            trust=request.trust,
            copy_strength=request.copy_strength,
            num_generated=num_tokens - request.num_prompt,
            is_known=request.is_known,
        )


def _open(vllm_config: Any, version: int) -> "DatastoreLogitsProcessor | None":
    settings, model = vllm_config.additional_config or {}, vllm_config.model_config
    if not isinstance(settings, dict):
        return None
    _refuse_others("additional_config", settings, (DATASTORE, NETWORKS))
    for name in (DATASTORE, NETWORKS):
        if not isinstance(settings.get(name, ""), str):
            raise InputError(f"{name} = {settings[name]!r:.200}: accepted is a path or URL as text.")
    if not (datastore := settings.get(DATASTORE)):
        return None
    if any(CopyingLogitsProcessor.__name__ in str(one) for one in model.logits_processors or ()):
        raise InputError(
            "vLLM finds CopyingLogitsProcessor as a plugin and would mix twice: leave out --logits-processors."
        )
    if version == 1 and vllm_config.scheduler_config.async_scheduling:
        raise InputError(
            "the first version of vLLM's model runner gives plugins no generated tokens with asynchronous scheduling: add "
            "--no-async-scheduling."
        )
    from transformers import AutoTokenizer

    from retro.huggingface.logits_processor import DatastoreLogitsProcessor

    tokenizer = AutoTokenizer.from_pretrained(model.tokenizer)
    return DatastoreLogitsProcessor.open(datastore, tokenizer, networks=settings.get(NETWORKS, ""))


def _new_request(params: Any, prompt: Sequence[int] | None = None, output: Sequence[int] = ()) -> _Request:
    """The request with these parameters.

    Raises:
        InputError: a value in `extra_args` is not accepted, or has an unknown name.
    """
    given = params.extra_args or {}
    _refuse_others("extra_args", given, (TRUST,))
    if not is_fraction(strength := given.get(STRENGTH, 1.0)):
        raise InputError(f"{STRENGTH} = {strength!r:.200}: accepted are numbers from 0 to 1.")
    return _Request(checked_trust(TRUST, given.get(TRUST, RETRIEVAL.start)), float(strength), prompt or (), output)


def _refuse_others(where: str, given: Any, known: Sequence[str]) -> None:
    """Raise InputError if there is another name that begins as those of this plugin: it would have no effect."""
    if others := sorted(str(name) for name in given if str(name).startswith(_OURS) and name not in known):
        raise InputError(f"{where} has {others[0]}: accepted names with {_OURS} are {', '.join(known)}.")


def _last_tokens(states: Any, ctx: Any) -> list[np.ndarray]:
    """The last tokens of the text of each row of logits. Those of a draft are only in `input_ids`, in the rows
    before."""
    back = torch.arange(LONGEST - 1, -1, -1, device=ctx.pos.device)
    row, position = torch.arange(len(ctx.pos), device=ctx.pos.device)[:, None], ctx.pos[:, None].long()
    committed = states.all_token_ids.gpu[ctx.expanded_idx_mapping.long()[:, None], (position - back).clamp(min=0)]
    drafted = ctx.input_ids[(row - back).clamp(min=0)]
    tokens = torch.where(back < ctx.expanded_local_pos[:, None], drafted, committed).cpu().numpy().astype(np.int64)
    return [text[max(0, LONGEST - 1 - last) :] for text, last in zip(tokens, ctx.pos.tolist(), strict=True)]


def trust_of(processor: "DatastoreLogitsProcessor", output: Any) -> list[float]:
    """How strong copying may be after a prompt, for `extra_args` of the next request with it.

    Args:
        processor: opened with the same datastore and networks, without a model.
        output: what vLLM returned for the prompt with `prompt_logprobs = 20` and `copy_strength = 0`. With fewer, less
            is known of what the model gives to tokens that can be copied.

    Raises:
        InputError: the output has no log-probabilities of its prompt.
    """
    if not getattr(output, "prompt_logprobs", None):
        raise InputError("output has no prompt_logprobs: request the prompt with SamplingParams(prompt_logprobs=20).")
    tokens, found = np.array(output.prompt_token_ids, np.int64), output.prompt_logprobs[1:]
    log_p = [by_token[token].logprob for token, by_token in zip(tokens[1:].tolist(), found, strict=True)]
    log_top = [max(one.logprob for one in by_token.values()) for by_token in found]
    nats, top = torch.tensor([[-one for one in log_p] + [0.0]]), torch.tensor([[*log_top, 0.0]])

    def losses_of(best: Tensor) -> TokenLosses:
        of_best = [
            [_log_p(token, by_token) for token in row]
            for row, by_token in zip(best[0, :-1].tolist(), found, strict=True)
        ]
        return TokenLosses(nats, top, torch.tensor([[*of_best, [0.0] * best.shape[2]]]))

    return [*processor.trust_after(tokens, losses_of)]


def _log_p(token: int, by_token: Mapping[int, Any]) -> float:
    """The log-probability of a token; of one that vLLM did not return, the largest that it can have."""
    if token in by_token:
        return float(by_token[token].logprob)
    known = [float(one.logprob) for one in by_token.values()]
    return min(*known, math.log(max(1e-9, 1 - math.fsum(map(math.exp, known)))))
