"""Copying from a datastore for any decoder of transformers, while it generates.

    processor = DatastoreLogitsProcessor.open("datastores/peps", tokenizer, model)
    model.generate(**inputs, logits_processor=[processor])

    a call of `generate` ─► new prompts, and their padding (`prompt_starts.py`)
    input_ids of a step ─► texts without padding ─► votes of the datastore ─┐
    scores of a step ───────────────────────────────────────────────────────┴─► `CopyHead.mix` ─► log-probabilities
    a new prompt ─► one pass of the model ─► trust in copying (`retro/copying/switch.py`)

The networks of the copy head read the model's probabilities and counts of votes, and nothing inside of the model. So
one set fits every architecture, quantization and device (`docs/explanation/copy-head.md`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessor

from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.remote import datastore_name
from indexing.suffixes.search import SHORTEST_RUN, SuffixIndex, trace
from indexing.tokenization.tokenizer import Tokenizer
from retro.batch.inputs import Inputs
from retro.copying.head import CopyHead, open_networks
from retro.copying.model import mixed
from retro.copying.rows import Row, find_neighbors
from retro.copying.step_votes import ComputeLosses, StepVotes
from retro.copying.switch import is_fraction
from retro.copying.transformers_model import losses_of_logits
from retro.huggingface.prompt_starts import announce_prompts
from retro.inference.trust import Trust
from retro.inference.verbatim_runs import Span, grouped, open_sorted_prefixes
from retro.model.datastore_fit import check_tokens

LONGEST_PROMPT = 2048
"""Tokens at the end of a prompt that decide how much is copied after it."""
_DOCUMENTS = 3  # that are named for a run


@dataclass(frozen=True)
class CopiedRun:
    """Tokens of a generated text that occur in a row in the datastore, as many as possible to both sides.

    Attributes:
        text: of the tokens.
        first: index of the first token in the row of `sequences`, padding included.
        tokens: their number.
        occurrences: how often they occur in the datastore.
        documents: ids of the first documents that they occur in.
        count: runs of the text that this one stands for, itself included: those of the same tokens, in any number and
            order, and those that overlap it by at least half of their length.
    """

    text: str
    first: int
    tokens: int
    occurrences: int
    documents: tuple[str, ...]
    count: int = 1


@dataclass(frozen=True)
class _Read:
    """A text that a step has read, the number of tokens of its prompt, and of padding before it."""

    row: Row
    prompt: int
    padding: int


class DatastoreLogitsProcessor(LogitsProcessor):
    """Mix copying from a datastore into the scores of a model, in `generate` of any decoder of transformers.

    Padding on the left, beams, sampling and several continuations work as without the processor. The scores that it
    returns are log-probabilities. A token whose score is -inf keeps it.

    Each call of `generate` of its model begins new prompts, whatever was generated before. In calls of the processor
    itself, a text that continues one of the call before keeps its trust, and so does a beginning of one: a rejected
    draft. There, `new_prompts` begins new prompts.
    """

    def __init__(
        self,
        head: CopyHead,
        suffixes: SuffixIndex,
        tokenizer: Tokenizer,
        pad_id: int | None,
        model: Any = None,
        retriever: Retriever | None = None,
        k: int = 0,
        copy_strength: float = 1.0,
    ) -> None:
        """See `open`, which finds these."""
        self.copy_strength = copy_strength
        self._head, self._suffixes, self._tokenizer, self._pad_id = head.eval(), suffixes, tokenizer, pad_id
        self._model, self._retriever, self._k = model, retriever, k
        self._votes: StepVotes | None = None
        self._device: torch.device | None = None
        self._texts, self._ids = list[_Read](), np.zeros((0, 0), np.int64)
        self._generating = False
        self._mask: np.ndarray | None = None  # of the prompts of this call of `generate`, bool [N, T]
        self._padding: np.ndarray | None = None  # before each of them, int64 [N]
        announce_prompts(model)

    @classmethod
    def open(
        cls,
        datastore: Path | str,
        tokenizer: Any,
        model: Any = None,
        *,
        networks: Path | str = "",
        k: int = 0,
        copy_strength: float = 1.0,
    ) -> "DatastoreLogitsProcessor":
        """Open a datastore for a model.

        Args:
            datastore: folder or URL of a datastore that was made with the tokenizer (`--tokenizer.kind huggingface`).
            tokenizer: the model's tokenizer, of transformers.
            model: the model, of transformers. It reads each prompt once more, and copying is as strong as it was right
                in the prompt. None = little is copied.
            networks: file of `retro add-retrieval` for a model of transformers, whose networks are used; empty = those
                that fit other text.
            k: neighbors of each chunk to copy from as well; 0 = only the whole datastore is searched.
            copy_strength: 0 to 1, factor of the odds of copying. 0 = the scores stay as they are.

        The model's attribute `generate` is replaced by one that tells the processor where prompts begin, and which
        tokens are padding (`attention_mask`). It computes the same.

        Raises:
            InputError: the datastore cannot be opened, has another tokenizer, or lacks the stage `suffixes`; the file
                of networks cannot be read; or an argument is not accepted.
        """
        if not is_fraction(copy_strength) or not isinstance(k, int) or k < 0:
            raise InputError(
                f"copy_strength = {copy_strength!r} and k = {k!r}: accepted are numbers from 0 to 1, and 0 or more neighbors."
            )
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise InputError("the model has an encoder that reads the prompt; only decoders are supported.")
        opened = Datastore.open(datastore)
        check_tokens(opened, tokenizer)
        retriever = Retriever.open(datastore) if k else None
        if retriever is not None:
            retriever.require_neighbors()
        head = _open_head(opened, str(networks), k)
        pad_id = getattr(tokenizer, "pad_token_id", None)
        own = Tokenizer.open(opened.folder / "tokenizer")
        suffixes = open_sorted_prefixes(opened.folder)
        return cls(head, suffixes, own, pad_id, model, retriever, k, copy_strength)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mix the scores [N, V] of the tokens after `input_ids` [N, T] with what is copied: log-probabilities float32
        [N, V].

        Raises:
            InputError: the scores have fewer ids than the datastore.
        """
        if scores.shape[-1] < self._tokenizer.num_model_tokens:
            raise InputError(
                f"the model has {scores.shape[-1]} ids and the datastore's tokenizer {self._tokenizer.num_model_tokens}: it is not the "
                "model that this datastore was made for."
            )
        if not self.copy_strength:
            return scores
        self._read(input_ids.cpu().numpy().astype(np.int64))  # a copy, that is compared with the next step
        return self.mix_rows([text.row for text in self._texts], scores)

    @torch.no_grad()
    def mix_rows(self, rows: Sequence[Row], scores: Tensor) -> Tensor:
        """Mix the scores [N, V] of the tokens after N rows, as `__call__` does."""
        return self._votes_on(scores.device).mixed(rows, scores.float())

    @torch.no_grad()
    def mix(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Mix the logits [N, T, V] of all next tokens of whole texts `tokens` [N, T] with what is copied:
        log-probabilities [N, T, V].

        A text may be padded at its end. Copying earns trust in each text, from its beginning on.
        """
        if not self.copy_strength:
            return logits
        texts, m = tokens.cpu().numpy().astype(np.int64), self._head.chunk_length
        inputs = Inputs(texts, votes=np.stack([self._suffixes.votes(text) for text in texts]))
        if self._retriever is not None and (count := texts.shape[1] // m):
            found = self._search(texts[:, : count * m].reshape(-1, m))[:2]
            neighbors, lengths = (table.reshape(len(texts), count, *table.shape[1:]) for table in found)
            inputs = inputs._replace(neighbors=neighbors, neighbor_lengths=lengths)
        on_device = inputs.map(lambda values: torch.from_numpy(values).to(logits.device))
        return mixed(self._head.to(logits.device), logits, on_device)

    @property
    def trust(self) -> list[Trust]:
        """How far copying is trusted in each text of the last step, and why it is so little where it is low: after a
        short prompt, for example.

        Without the argument `model` of `open` it is low in every text.
        """
        return [Trust.of(text.row.trust or self._head.switch.start, text.prompt) for text in self._texts]

    def sources(self, sequences: Tensor | None = None, least: int = SHORTEST_RUN) -> list[list[CopiedRun]]:
        """Find the runs of each generated text that occur verbatim in the datastore: in order, those without a word
        last.

        Args:
            sequences: what `generate` returned, [N, T]; None = the texts up to the last token but one.
            least: tokens of the shortest run.
        """
        if sequences is None:
            return [list(self._runs(text.row.tokens, text.prompt, 0, least)) for text in self._texts]
        found = []
        for row in sequences.cpu().numpy().astype(np.int64):
            text = self._text_of(row)
            found.append(list(self._runs(row[text.padding :], text.prompt, text.padding, least)))
        return found

    @torch.no_grad()
    def copied_tokens(self, sequences: Tensor) -> list[float]:
        """How many tokens of each generated text were copied: the sum of the copied shares of their probabilities. The
        model reads each text once more.

        Args:
            sequences: what `generate` returned, [N, T]. Tokens with the id of padding after the prompt do not count.

        Raises:
            InputError: the processor was opened without the argument `model`.
        """
        if self._model is None:
            raise InputError(
                "copied_tokens needs the model: DatastoreLogitsProcessor.open(datastore, tokenizer, model)."
            )
        return [self._copied_tokens(row) for row in sequences.cpu().numpy().astype(np.int64)]

    def _copied_tokens(self, sequence: np.ndarray) -> float:
        begun = self._text_of(sequence)
        tokens, first = sequence[begun.padding :], max(1, begun.prompt)
        generated = len(tokens) - begun.prompt
        text = replace(
            begun.row, tokens=tokens, copy_strength=self.copy_strength, neighbors=[], num_generated=generated
        )
        if len(text.tokens) <= first:
            return 0.0
        if self._retriever is not None:
            find_neighbors([text], self._head.chunk_length)
        shares = self._votes_on(self._model.device).copied_shares_of(text, self._losses_of(text))[first - 1 : -1]
        return float(shares.cpu().numpy()[text.tokens[first:] != self._pad_id].sum())

    # --- texts --------------------------------------------------------------------------------------------------------

    def reads_with(self, model: Any) -> bool:
        """Whether prompts are read with this model."""
        return self._model is model

    @contextmanager
    def new_prompts(self, attention_mask: Tensor | None = None) -> Iterator[None]:
        """Read the texts of the next calls as new prompts and what is generated after them, until the context ends.

        `generate` of the model does so. A call of `generate` in it, with which a model drafts for itself, continues its
        texts.

        Args:
            attention_mask: [N, T] of the prompts, 0 = padding; None = tokens with the id of padding before a text are
                padding.
        """
        if self._generating:
            yield
            return
        self._texts, self._ids, self._padding = [], np.zeros((0, 0), np.int64), None
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
            self._mask = attention_mask.cpu().numpy() != 0
        self._generating = True
        try:
            yield
        finally:
            self._generating, self._mask, self._padding = False, None, None

    def _padding_of(self, ids: np.ndarray) -> np.ndarray:
        """The number of padding tokens before each text of a step, int64 [N]."""
        if self._padding is None or len(ids) % len(self._padding):
            num_tokens = ids.shape[1]
            is_real = ids != self._pad_id
            if self._mask is not None and self._mask.shape[1] >= num_tokens:
                # The mask is also that of tokens that are embeddings or in a cache already. They come first.
                is_real = self._mask[:, self._mask.shape[1] - num_tokens :]
            padding: np.ndarray = np.logical_and.accumulate(~is_real, axis=1).sum(axis=1)
            if not self._generating:
                return padding
            self._padding = padding
        return np.repeat(
            self._padding, len(ids) // len(self._padding)
        )  # beams and continuations of a prompt follow each other

    def _read(self, ids: np.ndarray) -> None:
        """Read the texts of a step, int64 [N, T]. One that continues a text of the step before has its trust and its
        neighbors."""
        if ids.shape == (len(self._ids), self._ids.shape[1] + 1) and (ids[:, :-1] == self._ids).all():
            texts = self._texts  # each in its row, as nearly always
            for text, row in zip(texts, ids, strict=True):
                text.row.tokens = row[text.padding :]
                text.row.num_generated += 1
        else:
            known = {text.row.tokens.tobytes(): text for text in self._texts}
            rows = [(row[padding:], int(padding)) for row, padding in zip(ids, self._padding_of(ids), strict=True)]
            texts = [self._continued(tokens, known) or self._begun(tokens, padding) for tokens, padding in rows]
        if self._retriever is not None:
            find_neighbors([text.row for text in texts], self._head.chunk_length)
        trusts = dict[bytes, tuple[float, ...]]()
        for text in texts:
            if len(text.row.tokens) == text.prompt:
                key = text.row.tokens.tobytes()  # several continuations have the same prompt
                trusts[key] = text.row.trust = trusts.get(key) or self._trust(text.row)
        self._texts, self._ids = texts, ids

    def _continued(self, tokens: np.ndarray, known: dict[bytes, _Read]) -> _Read | None:
        """The text if it continues one of the step before, or the part of one that is left when a draft was
        rejected."""
        if not len(tokens):
            return None
        size = len(tokens) - 1
        longer = (text for text in self._texts if text.prompt <= size < len(text.row.tokens))
        parts = (text for text in longer if np.array_equal(text.row.tokens[:size], tokens[:size]))
        if (earlier := known.get(tokens[:size].tobytes()) or next(parts, None)) is None:
            return None
        neighbors = earlier.row.neighbors[: len(tokens) // self._head.chunk_length]
        generated = len(tokens) - earlier.prompt
        row = replace(earlier.row, tokens=tokens, neighbors=neighbors, num_generated=generated)
        return replace(earlier, row=row)

    def _begun(self, tokens: np.ndarray, padding: int) -> _Read:
        """The text as a new prompt."""
        return _Read(self.row(tokens, copy_strength=self.copy_strength), len(tokens), padding)

    def _text_of(self, sequence: np.ndarray) -> _Read:
        """The text of the last step that became a generated sequence [T], as `generate` returns it; one without a
        prompt if there is none."""
        for text in self._texts:
            begin, stop = text.padding, text.padding + text.prompt
            prompt = text.row.tokens[: text.prompt]
            if (sequence[:begin] == self._pad_id).all() and np.array_equal(sequence[begin:stop], prompt):
                return text
        padding = int(self._padding_of(sequence[None])[0])
        return _Read(self.row(sequence[padding:]), 0, padding)

    def row(self, tokens: np.ndarray, **given: Any) -> Row:
        """A text int64 [t] for `mix_rows`, with what is known of it (`Row`)."""
        return Row(tokens, self._search, slot=0, prompt=None, **given)

    def _search(self, chunks: np.ndarray) -> tuple[np.ndarray, ...]:
        """Neighbors of chunks [n, m]; see `RetrieveNeighbors`."""
        assert self._retriever is not None, "without neighbors, nothing is searched by chunks"
        return self._retriever.neighbors.find(chunks, self._k)

    def _trust(self, row: Row) -> tuple[float, ...]:
        """Trust in copying after a prompt: what the model would have gained from it in the prompt. Without tokens, that
        of any text."""
        if self._model is None or not len(row.tokens):
            return self._head.switch.start
        end, m = row.copy(slot=0), self._head.chunk_length
        end.drop(-(-max(0, len(row.tokens) - LONGEST_PROMPT) // m), m)
        return self._votes_on(self._model.device).trust(end, self._losses_of(end))

    def _losses_of(self, row: Row) -> ComputeLosses:
        """The model's losses of the tokens after those of a text."""
        tokens = torch.from_numpy(row.tokens)[None].to(self._model.device)  # [1, t]
        logits = self._model(input_ids=tokens, use_cache=False).logits.to(self._model.device)
        return lambda best: losses_of_logits(logits, F.pad(tokens[:, 1:], (0, 1)), best)

    @torch.no_grad()
    def trust_after(self, tokens: np.ndarray, losses_of: ComputeLosses) -> tuple[float, ...]:
        """Trust in copying after a prompt int64 [t], from a model's losses of the tokens after each one; the last does
        not count."""
        return self._votes_on(torch.device("cpu")).trust(self.row(tokens), losses_of)

    def _votes_on(self, device: torch.device) -> StepVotes:
        """The votes, with the networks on a device."""
        if self._votes is None or device != self._device:
            self._votes, self._device = StepVotes(self._head.to(device), device, self._suffixes), device
        return self._votes

    def _runs(self, tokens: np.ndarray, prompt: int, padding: int, least: int) -> Iterator[CopiedRun]:
        """The runs of a text [t] that have tokens after its prompt."""
        runs = [run for run in trace(self._suffixes, tokens, least) if run.stop > prompt]
        texts = [self._tokenizer.decode(tokens[run.first : run.stop]) for run in runs]
        spans = [Span.of("", run, tokens, text) for run, text in zip(runs, texts, strict=True)]
        for index, others in grouped(spans):
            run = runs[index]
            places = self._suffixes.places(run.match, _DOCUMENTS)
            documents, count = tuple(str(place.document["id"]) for place in places), self._suffixes.count(run.match)
            yield CopiedRun(texts[index], padding + run.first, run.stop - run.first, count, documents, 1 + len(others))


def _open_head(datastore: Datastore, networks: str, k: int) -> CopyHead:
    """A copy head for the sources of a processor: with the networks of a file, or those that fit other text."""
    head = CopyHead(("neighbors", "datastore") if k else ("datastore",), int(datastore.manifest["chunk_length"]))
    head.initialize()
    if networks:
        stored = open_networks(Path(networks)).weights
        if missing := [name for name in head.state_dict() if name not in stored]:
            raise InputError(
                f"networks = {networks!r}: it has no {missing[0].partition('.')[0]}. Make it with `retro add-retrieval MODEL --datastore "
                f"{datastore_name(datastore.folder)} --output FILE.safetensors`."
            )
        head.load_state_dict({name: stored[name] for name in head.state_dict()})
    return head
