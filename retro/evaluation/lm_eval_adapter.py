"""A model of EleutherAI's lm-eval harness: `--model retro --model_args checkpoint=RUN,retrieval=on,k=2`.

    requests of tasks → tokens after the beginning-of-document token → LanguageModel.score, generate → log-likelihoods, texts

Importing this module registers the model; `python -m retro.evaluation.lm_eval_adapter …` runs lm-eval's command line
with it. The adapter follows lm-eval's client for OpenAI's API (`local-completions`), so both give the same results: it
tokenizes context and continuation together, truncates long requests at the beginning, scores whole texts in windows
that overlap by one token, and puts the beginning-of-document token in front of every text without it.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from indexing.store.errors import InputError
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings

_DEFAULT_BATCH = 8
_MAX_GENERATED = 256  # default of lm-eval's other models
_DEFAULT_DEVICE = "cuda:0"  # lm-eval's command line passes this device if the user names none
_SAMPLING = ("temperature", "top_k", "top_p", "seed")


@register_model("retro")
class RetroLM(TemplateLM):
    """A checkpoint with retrieval ON or OFF.

    Args:
        checkpoint: folder of a checkpoint, RUN, RUN@best or an exported file.
        datastore: datastore for retrieval; empty = the first datastore of the training run.
        retrieval: `on` or `off`.
        k: number of neighbors of each chunk.
        max_length: tokens of context and continuation, including the beginning-of-document token; 0 = the length of
            training.
        batch_size: number of sequences in a batch.
        device: `auto`, `cpu`, `cuda` …
        max_batch_size: ignored; lm-eval passes it.

    Raises:
        InputError: an argument is invalid, or checkpoint or datastore cannot be opened.
    """

    def __init__(
        self,
        checkpoint: str,
        datastore: str = "",
        retrieval: str | bool = "on",
        k: int = 2,
        max_length: int = 0,
        batch_size: int | str = _DEFAULT_BATCH,
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        on = {"on": True, "off": False, True: True, False: False}.get(retrieval)
        if on is None:
            raise InputError(f"retrieval = {retrieval!r}: accepted are on and off.")
        if int(k) < 1:
            raise InputError(f"k = {k}: must be at least 1. Use retrieval=off to read no neighbors.")
        if device is None or (device == _DEFAULT_DEVICE and not torch.cuda.is_available()):
            device = "auto"
        self.language_model = LanguageModel.open(checkpoint, datastore or None, device, retrieval=on)
        self.k = int(k) if self.language_model.retriever is not None else 0
        self.batch_size = _DEFAULT_BATCH if str(batch_size).startswith("auto") else int(batch_size)
        # One position is reserved for the beginning-of-document token.
        self.max_length = (int(max_length) or self.language_model.context) - 1
        if self.max_length < 2 or self.batch_size < 1:
            raise InputError(
                f"max_length = {max_length} and batch_size = {batch_size}: must be at least 3 (or 0) and at least 1."
            )

    # --- interface of lm-eval ---------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self.language_model.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The beginning-of-document token, which precedes an empty context and a whole text."""
        return self.language_model.tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        """The checkpoint's fingerprint, which identifies cached requests."""
        return self.language_model.checkpoint.fingerprint

    def get_model_info(self) -> dict[str, Any]:
        """Return metadata that lm-eval writes next to the results."""
        model = self.language_model
        source = model.retriever.datastore.fingerprint if model.retriever else None
        fingerprints = {"checkpoint": model.checkpoint.fingerprint, "datastore": source}
        return {"fingerprints": fingerprints, "retrieval": "on" if self.k else "off", "k": self.k}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """Tokenize without special tokens; `add_special_tokens` is ignored."""
        return self.language_model.tokenizer.encode(string).tolist()

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Compute log-likelihoods of whole texts, in nats."""
        windows = [list(self._windows(request.args[0])) for request in requests]
        scored = iter(self._loglikelihood_tokens(list(chain(*windows)), disable_tqdm=disable_tqdm))
        totals = [sum(next(scored)[0] for _ in own) for own in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate continuations up to a stop string, without it; greedy unless the task samples."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="generate", disable=disable_tqdm) as bar:
            for indices in groups.values():
                options = requests[indices[0]].args[1]
                for batch in _batches(sorted(indices, key=lambda n: len(requests[n].args[0])), self.batch_size):
                    continued = self._continue([requests[index].args[0] for index in batch], options)
                    for index, text in zip(batch, continued, strict=True):
                        texts[index] = text
                        self.cache_hook.add_partial("generate_until", requests[index].args, text)
                    bar.update(len(batch))
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: object
    ) -> list[tuple[float, bool]]:
        """Return for each (key, context, continuation) the log-likelihood of the continuation, and True if greedy
        decoding gives it."""
        out: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda n: -len(requests[n][1]) - len(requests[n][2]))
        with tqdm(total=len(requests), desc="score", disable=disable_tqdm) as bar:
            for batch in _batches(order, self.batch_size):
                rows = [self._as_document((requests[n][1] + requests[n][2])[-self.max_length :]) for n in batch]
                scores = self.language_model.score_with_likeliest(rows, self.k, 1)
                for index, row, score in zip(batch, rows, scores, strict=True):
                    key, _, continuation = requests[index]
                    scored = slice(len(row) - 1 - min(len(continuation), len(row) - 1), None)
                    own, best = score.log_probabilities[scored], score.likeliest_log_probabilities[scored, 0]
                    out[index] = (float(own.sum()), bool((own >= best).all()))
                    if key is not None:
                        self.cache_hook.add_partial("loglikelihood", key, out[index])
                bar.update(len(batch))
        return out

    # --- implementation --------------------------------------------------------------------------------------------

    def _windows(self, text: str) -> Iterator[tuple[None, list[int], list[int]]]:
        """Split a text into pairs of context and continuation; the continuations are all of its tokens."""
        for pair in utils.get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length
            - 1,  # like `local-completions`, which reserves a position for a generated token
            context_len=1,
        ):
            yield (None, *utils.make_disjoint_window(pair))

    def _continue(self, contexts: Sequence[str], options: dict[str, Any]) -> list[str]:
        """Generate continuations of contexts with the same settings."""
        normalized = normalize_gen_kwargs(options, min(_MAX_GENERATED, self.max_length // 2))
        unknown = set(normalized) - {"until", "do_sample", "max_gen_toks", *_SAMPLING}
        if unknown:
            raise InputError(
                f"generation_kwargs has {sorted(unknown)[0]!r}; accepted are until, do_sample, max_gen_toks, {', '.join(_SAMPLING)}."
            )
        sampling = {"temperature": 0.0, "top_k": 0, "top_p": 1.0} | {
            key: normalized[key] for key in _SAMPLING if normalized.get(key) is not None
        }
        settings = GenerationSettings(
            max_tokens=normalized["max_gen_toks"], stop=tuple(normalized["until"]), **sampling
        )
        room = self.max_length - settings.max_tokens
        if room < 1:
            raise InputError(
                f"max_gen_toks = {settings.max_tokens} leaves no room for a prompt in {self.max_length} tokens. Lower it."
            )
        prompts = [self._as_document(self.tok_encode(context)[-room:]) for context in contexts]
        texts = [""] * len(prompts)
        for step in self.language_model.generate(prompts, settings, self.k):
            for token in step:
                texts[token.row] += token.text
        return texts

    def _as_document(self, tokens: list[int]) -> np.ndarray:
        """Put the beginning-of-document token in front of tokens [t], unless it is there."""
        begin = [] if tokens[:1] == [self.prefix_token_id] else [self.prefix_token_id]
        return np.array(begin + tokens, dtype=np.int64)


def _batches(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (indices[start : start + size] for start in range(0, len(indices), size))


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
