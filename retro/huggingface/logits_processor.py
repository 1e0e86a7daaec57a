"""Copying from a datastore for any decoder of transformers, while it generates.

    processor = DatastoreLogitsProcessor.open("datastores/peps", tokenizer, model)
    model.generate(**inputs, logits_processor=[processor])

    input_ids of a step ─► texts without padding ─► votes of the datastore ─┐
    scores of a step ───────────────────────────────────────────────────────┴─► `CopyHead.mix` ─► log-probabilities
    a new prompt ─► one pass of the model ─► trust in copying (`retro/copying/switch.py`)

The networks of the copy head read the model's probabilities and counts of votes, and nothing inside of the model. So one set fits every
architecture, quantization and device (`docs/explanation/copy-head.md`).
"""

from collections.abc import Iterator, Sequence
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
from retro.batch.loss import TokenLosses
from retro.copying.head import CopyHead, open_networks
from retro.copying.model import mixed
from retro.copying.rows import Row, find_neighbors
from retro.copying.step_votes import StepVotes
from retro.copying.switch import START
from retro.copying.transformers_model import losses_of_logits
from retro.inference.verbatim_runs import open_sorted_prefixes
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
    """

    text: str
    first: int
    tokens: int
    occurrences: int
    documents: tuple[str, ...]


@dataclass(frozen=True)
class _Read:
    """A text that a step has read, and the number of tokens of its prompt."""

    row: Row
    prompt: int


class DatastoreLogitsProcessor(LogitsProcessor):
    """Mix copying from a datastore into the scores of a model, in `generate` of any decoder of transformers.

    Padding on the left, beams, sampling and several continuations work as without the processor. The scores that it returns are
    log-probabilities. A token whose score is -inf keeps it.
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
            model: the model, of transformers. It reads each prompt once more, and copying is as strong as it was right in the
                prompt. None = little is copied.
            networks: file of `retro add-retrieval` for a model of transformers, whose networks are used; empty = those that fit other text.
            k: neighbors of each chunk to copy from as well; 0 = only the whole datastore is searched.
            copy_strength: 0 to 1, factor of the odds of copying. 0 = the scores stay as they are.

        Raises:
            InputError: the datastore cannot be opened, has another tokenizer, or lacks the stage `suffixes`; the file of networks
                cannot be read; or an argument is not accepted.
        """
        if not 0 <= copy_strength <= 1 or k < 0:
            raise InputError(f"copy_strength = {copy_strength} and k = {k}: accepted are 0 to 1, and 0 or more.")
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise InputError("the model has an encoder that reads the prompt; only decoders are supported.")
        opened = Datastore.open(datastore)
        check_tokens(opened, tokenizer)
        retriever = Retriever.open(datastore) if k else None
        head = _open_head(opened, str(networks), k)
        pad_id = getattr(tokenizer, "pad_token_id", None)
        own = Tokenizer.open(opened.folder / "tokenizer")
        suffixes = open_sorted_prefixes(opened.folder)
        return cls(head, suffixes, own, pad_id, model, retriever, k, copy_strength)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mix the scores [N, V] of the tokens after `input_ids` [N, T] with what is copied: log-probabilities float32 [N, V].

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
        """Mix the logits [N, T, V] of all next tokens of whole texts `tokens` [N, T] with what is copied: log-probabilities [N, T, V].

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

    def sources(self, sequences: Tensor | None = None, least: int = SHORTEST_RUN) -> list[list[CopiedRun]]:
        """Find the runs of each generated text that occur verbatim in the datastore, in order.

        Args:
            sequences: what `generate` returned, [N, T]; None = the texts up to the last token but one.
            least: tokens of the shortest run.
        """
        if sequences is None:
            return [list(self._runs(text.row.tokens, text.prompt, 0, least)) for text in self._texts]
        found = []
        for row in sequences.cpu().numpy():
            tokens = self._without_padding(row)
            texts = (
                text for text in self._texts if np.array_equal(tokens[: text.prompt], text.row.tokens[: text.prompt])
            )
            prompt = next((text.prompt for text in texts), 0)
            found.append(list(self._runs(tokens, prompt, len(row) - len(tokens), least)))
        return found

    # --- texts --------------------------------------------------------------------------------------------------------

    def _without_padding(self, row: np.ndarray) -> np.ndarray:
        """The tokens of a row [T] from the first that is not padding; one is kept if it is the beginning-of-document token."""
        real = np.flatnonzero(row != self._pad_id)
        first = int(real[0]) if len(real) else len(row) - 1
        return row[max(0, first - (self._pad_id == self._tokenizer.bos_id)) :].astype(np.int64)

    def _read(self, ids: np.ndarray) -> None:
        """Read the texts of a step, int64 [N, T]. One that continues a text of the step before has its trust and its neighbors."""
        if ids.shape == (len(self._ids), self._ids.shape[1] + 1) and (ids[:, :-1] == self._ids).all():
            texts = self._texts  # each in its row, as nearly always
            for text, row in zip(texts, ids, strict=True):
                text.row.tokens = row[len(row) - len(text.row.tokens) - 1 :]
        else:
            known = {text.row.tokens.tobytes(): text for text in self._texts}
            texts = [
                self._continued(tokens, known) or self._begun(tokens) for tokens in map(self._without_padding, ids)
            ]
        if self._retriever is not None:
            find_neighbors([text.row for text in texts], self._head.chunk_length)
        trusts = dict[bytes, tuple[float, ...]]()
        for text in texts:
            if len(text.row.tokens) == text.prompt:
                key = text.row.tokens.tobytes()  # several continuations have the same prompt
                trusts[key] = text.row.trust = trusts.get(key) or self._trust(text.row)
        self._texts, self._ids = texts, ids

    def _continued(self, tokens: np.ndarray, known: dict[bytes, _Read]) -> _Read | None:
        """The text if it continues one of the step before, or the part of one that is left when a draft was rejected."""
        size = len(tokens) - 1
        longer = (text for text in self._texts if text.prompt <= size < len(text.row.tokens))
        parts = (text for text in longer if np.array_equal(text.row.tokens[:size], tokens[:size]))
        if (earlier := known.get(tokens[:size].tobytes()) or next(parts, None)) is None:
            return None
        neighbors = earlier.row.neighbors[: len(tokens) // self._head.chunk_length]
        return replace(earlier, row=replace(earlier.row, tokens=tokens, neighbors=neighbors))

    def _begun(self, tokens: np.ndarray) -> _Read:
        """The text as a new prompt."""
        return _Read(self.row(tokens, copy_strength=self.copy_strength), len(tokens))

    def row(self, tokens: np.ndarray, trust: tuple[float, ...] = START, copy_strength: float = 1.0) -> Row:
        """A text int64 [t] for `mix_rows`."""
        return Row(tokens, self._search, slot=0, trust=trust, copy_strength=copy_strength, prompt=None)

    def _search(self, chunks: np.ndarray) -> tuple[np.ndarray, ...]:
        """Neighbors of chunks [n, m]; see `RetrieveNeighbors`."""
        assert self._retriever is not None, "without neighbors, nothing is searched by chunks"
        return self._retriever.neighbors.find(chunks, self._k)

    def _trust(self, row: Row) -> tuple[float, ...]:
        """Trust in copying after a prompt: what the model would have gained from it in the prompt."""
        if self._model is None:
            return row.trust
        end, m = row.copy(slot=0), self._head.chunk_length
        end.drop(-(-max(0, len(row.tokens) - LONGEST_PROMPT) // m), m)
        tokens = torch.from_numpy(end.tokens)[None].to(self._model.device)  # [1, t]
        logits = self._model(input_ids=tokens, use_cache=False).logits
        following = F.pad(tokens[:, 1:], (0, 1))
        return self._votes_on(logits.device).trust(end, losses_of_logits(logits, following.to(logits.device)))

    @torch.no_grad()
    def trust_after(self, tokens: np.ndarray, vocabulary: TokenLosses) -> tuple[float, ...]:
        """Trust in copying after a prompt int64 [t], from the model's losses [1, t] of the tokens after each one; the last does not count."""
        return self._votes_on(vocabulary.nats.device).trust(self.row(tokens), vocabulary)

    def _votes_on(self, device: torch.device) -> StepVotes:
        """The votes, with the networks on a device."""
        if self._votes is None or device != self._device:
            self._votes, self._device = StepVotes(self._head.to(device), device, self._suffixes), device
        return self._votes

    def _runs(self, tokens: np.ndarray, prompt: int, padding: int, least: int) -> Iterator[CopiedRun]:
        """The runs of a text [t] that have tokens after its prompt."""
        for run in trace(self._suffixes, tokens, least):
            if run.stop > prompt:
                places = self._suffixes.places(run.match, _DOCUMENTS)
                documents = tuple(str(place.document["id"]) for place in places)
                text, count = self._tokenizer.decode(tokens[run.first : run.stop]), self._suffixes.count(run.match)
                yield CopiedRun(text, padding + run.first, run.stop - run.first, count, documents)


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
