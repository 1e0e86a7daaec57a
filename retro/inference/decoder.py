"""Next-token logits of a batch of growing rows, with retrieval at chunk boundaries.

    tokens of a row ─ (complete chunks → neighbors) ─ the layers, with a cache (`cached_layers.py`) ─ logits of the next token

Rows join with `add` and leave with `remove` between any two steps. A step has up to two passes. The first reads one
token of every row that has one left, the rows that generate, and the tokens of their drafts. The second reads up to
`WINDOW_TOKENS` tokens of rows that have more left: the prompts. So a long prompt delays the other rows by a part of it
per step, not by its length. Where activations depend on neighbors, the part of a row is one window
(`ChunkedCrossAttention`): the tokens of a window attend to the neighbors of one chunk.

The letters of the shape comments are those of `model/retro.py`. In addition, N is the number of rows in a pass, B the
number of slots in the cache, and n the number of tokens per row.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retro.batch.loss import TokenLosses, token_losses
from retro.copying.provenance import CopiedFrom
from retro.copying.rows import RetrieveNeighbors, Row, WholeDatastore, find_neighbors
from retro.copying.step_votes import StepVotes
from retro.device import Placement
from retro.inference.cache import Cache
from retro.inference.cached_layers import CachedLayers
from retro.inference.drafts import LONGEST_DRAFT
from retro.inference.neighbor_cache import NeighborCache
from retro.inference.span import Span
from retro.model.retro import Retro

WINDOW_TOKENS = 512
"""Largest number of tokens of prompts that a step reads, unless a single window has more."""

INTERLEAVED_TOKENS = 128
"""Largest number of tokens of one prompt that a step reads while other rows generate, since these wait for it. On a
CPU, passes over more tokens are hardly faster per token."""

DRAFTED_TOKENS = 32
"""Largest number of tokens, drafts included, of the rows that generate: wrong drafts save nothing."""


Propose = Callable[[Row, int, int], np.ndarray]
"""A row that has one token left, a number of tokens, and the number of rows of the pass → its draft of at most this
many tokens, int64."""


class Decoder:
    """Reads prompts and generated tokens: `add` rows, then `step`, `append` a token to each row that was read, `step` …

    A step can read a draft of next tokens too. `append` then takes as many of them as are right, and one more token;
    the others are removed from the cache.

    If a row exceeds the context, the decoder drops its oldest tokens, a quarter of the context in whole chunks, and
    reads the others again. Dropping one chunk at a time would spend most of the time on rereading.

    Attributes:
        rows: rows in the order in which they joined.
    """

    def __init__(
        self,
        model: Retro,
        placement: Placement,
        context: int,
        datastore: WholeDatastore | None = None,
        neighbor_cache: NeighborCache | None = None,
    ) -> None:
        """Create a decoder without rows.

        Args:
            model: in evaluation mode.
            placement: device and precision.
            context: largest number of tokens that the model reads, a multiple of the chunk length.
            datastore: finds the tokens that follow the text; None = the copy head and drafts do not use it.
            neighbor_cache: of a model whose decoder reads neighbors; None = a cache that keeps nothing.

        Raises:
            InputError: the model's learned positions end before the context.
        """
        model.settings.check_length(context)
        self.model, self.placement, self.context, self.datastore = model, placement, context, datastore
        self.m = model.settings.chunk_length
        self.dropped_at_once = max(1, context // 4 // self.m)  # chunks
        self.output = model.packed_output or partial(F.linear, weight=model.output_weight.to(placement.dtype))
        self.layers = CachedLayers(model, placement, context, neighbor_cache or NeighborCache(model, 0))
        device = model.embedding.weight.device
        self.votes = None if model.copy_head is None else StepVotes(model.copy_head, device, datastore)
        self.rows: list[Row] = []

    def empty(self) -> "Decoder":
        """Return another decoder of the same model, without rows."""
        return Decoder(self.model, self.placement, self.context, self.datastore, self.layers.neighbor_cache)

    @property
    def cache(self) -> Cache:
        """What the rows have read."""
        return self.layers.cache

    # --- rows ---------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def add(
        self,
        tokens: np.ndarray,
        retrieve: RetrieveNeighbors | None = None,
        trust: tuple[float, ...] | None = None,
        copy_strength: float = 1.0,
        inserted: tuple[int, int] = (0, 0),
        num_generated: int = 0,
    ) -> Row:
        """Add a row for a prompt [t], t ≥ 1. Rows with equal `retrieve` are searched together.

        `trust` is what an earlier row with the same prompt earned, if tokens were generated since; None = it is
        learned. `copy_strength` is that of `GenerationSettings`, `inserted` and `num_generated` are those of `Row`.
        """
        row = Row(
            np.array(tokens, np.int64),
            retrieve,
            slot=len(self.rows),
            copy_strength=copy_strength,
            inserted=inserted,
            num_generated=num_generated,
        )
        if trust is not None:
            row.trust, row.prompt = trust, None
        self.layers.make_slots(len(self.rows) + 1)
        self.rows.append(row)
        self._drop(row)
        return row

    @torch.inference_mode()
    def append(self, row: Row, *tokens: int) -> None:
        """Append tokens to a row that was read: those tokens of its draft that are right, and one more."""
        wrong = len(row.draft) - (len(tokens) - 1)
        if wrong:
            row.num_read -= wrong
            self.cache.remove_last(row.slot, wrong)
        row.tokens, row.draft = np.append(row.tokens, tokens), row.draft[:0]
        row.num_generated += len(tokens)
        self._drop(row)

    @torch.inference_mode()
    def copy(self, row: Row) -> Row:
        new = row.copy(slot=len(self.rows))
        self.layers.make_slots(len(self.rows) + 1)
        self.cache.copy(row.slot, new.slot, row.num_read)
        self.rows.append(new)
        return new

    @torch.inference_mode()
    def remove(self, row: Row) -> None:
        """Remove a row. The memory of the cache is freed with the last row."""
        self.rows.remove(row)
        if not self.rows:
            self.layers.clear()
            return
        if row.slot < len(self.rows):  # the last slot moves into the gap
            moved = next(other for other in self.rows if other.slot == len(self.rows))
            self.cache.copy(moved.slot, row.slot, moved.num_read)
            moved.slot = row.slot

    def _drop(self, row: Row) -> None:
        surplus = len(row.tokens) - self.context
        if surplus > 0:
            block = self.dropped_at_once
            row.drop(-(-surplus // (block * self.m)) * block, self.m)

    # --- a step -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, propose: Propose | None = None) -> tuple[list[Row], Tensor]:
        """Read one token of each row that has one left, with its draft, and the next part of the first few others.

        Args:
            propose: returns the draft of a row, of at most the given number of tokens; None = no drafts.

        Returns:
            rows that were read to their end by this step, and the logits of their next tokens, [rows, V] float32: for a
                row with a draft of d tokens 1 + d of them, after its last token and after each token of the draft. With
                a copy head they are log-probabilities.
        """
        unread = [row for row in self.rows if row.num_unread]
        single = [row for row in unread if row.num_unread == 1]
        windows = [row for row in unread if row.num_unread > 1]
        if windows:  # those that read like the first one
            windows = [row for row in windows if self._reads_neighbors(row) == self._reads_neighbors(windows[0])]
            windows = windows[: max(1, WINDOW_TOKENS // self.m)]
        find_neighbors([*single, *windows], self.m)
        if propose is not None:
            for row in single:
                row.draft = propose(row, self._room_for_draft(row, len(single)), len(single))
        self._put_first(single)
        rows, hidden = list[Row](), list[Tensor]()
        with self.placement.autocast():
            for part in (single, windows):
                if part:
                    span = self._pass_of(part, INTERLEAVED_TOKENS if single else WINDOW_TOKENS)
                    h = self.layers.run(span)
                    for row, read, start, last in zip(
                        span.rows, h, span.starts.tolist(), span.last.tolist(), strict=True
                    ):
                        self._learn_trust(row, read[: row.num_read - start])
                        if not row.num_unread:
                            rows.append(row)
                            # [1 + d, D]: the last token and its draft. Only these need logits, which are V wide.
                            hidden.append(read[last - len(row.draft) : last + 1])
            if not rows:
                return rows, torch.empty(0, self.model.settings.vocab_size)
            # Activations of all rows in one product with [V, D], which takes as long to read for one row.
            read = self.model.finish(torch.cat(hidden).float())
            logits = self.output(read).float()
            return rows, logits if self.votes is None else self.votes.mixed(rows, logits)

    def _learn_trust(self, row: Row, read: Tensor) -> None:
        """Keep the activations [n, D] of the next part of a prompt; after the last one, learn the trust in copying
        from all."""
        if row.prompt is None or self.votes is None or not self.votes.learns_trust(row):
            return
        row.prompt = torch.cat((row.prompt, read)) if len(row.prompt) else read
        if not row.num_unread:
            read, row.prompt = row.prompt, None
            row.trust = self.votes.trust(row, partial(self._losses_that_earn, row, read))

    def _losses_that_earn(self, row: Row, read: Tensor, best: Tensor) -> TokenLosses:
        """Losses [1, t] of the tokens after those of a row, from activations [t, D] and best candidates [1, t, C]; 0 for
        tokens that earn no trust: of passages, no logits are needed."""
        assert self.votes is not None
        earns = torch.from_numpy(self.votes.earning(row)).to(read.device)
        none = torch.zeros_like(best, dtype=torch.float32)
        losses = TokenLosses(none[..., 0].clone(), none[..., 0].clone(), none)
        if len(earns):
            hidden = self.model.finish(read[earns].float())[None]
            following = torch.from_numpy(row.tokens[1:]).to(read.device)[earns]
            earned = token_losses(hidden, self.model.output_weight, following[None], best[:, earns], self.output)
            for values, part in zip(losses, earned, strict=True):
                values[:, earns] = part
        return losses

    def read(self, rows: Sequence[Row]) -> Tensor:
        """Take steps until these rows are read; return the logits of their next tokens, [rows, V] float32."""
        logits: dict[Row, Tensor] = {}
        while any(row.num_unread for row in rows):
            logits.update(zip(*self.step(), strict=True))
        return torch.stack([logits[row] for row in rows])

    def _reads_neighbors(self, row: Row) -> bool:
        """Return whether the activations of a row depend on neighbors, so that a pass must end with a window."""
        return self.model.settings.activations_read and row.retrieve is not None

    def _room_for_draft(self, row: Row, num_rows: int) -> int:
        """Return the largest length of a draft: neighbors must not change in it, nor the context overflow."""
        until_border = self.m - 1 - len(row.tokens) % self.m if row.retrieve else LONGEST_DRAFT
        room = min(LONGEST_DRAFT, until_border, self.context - len(row.tokens), DRAFTED_TOKENS // num_rows - 1)
        return max(0, room)

    def _put_first(self, rows: list[Row]) -> None:
        """Give rows the first slots, so that their keys and values are read without a copy."""
        gaps = sorted({*range(len(rows))} - {row.slot for row in rows})
        for row, gap in zip([row for row in rows if row.slot >= len(rows)], gaps, strict=True):
            other = next(row for row in self.rows if row.slot == gap)
            self.cache.swap(row.slot, gap, max(row.num_read, other.num_read))
            row.slot, other.slot = gap, row.slot

    def copied_from(
        self, rows: Sequence[Row], indices: list[int], tokens: Sequence[int], log_probabilities: Sequence[float]
    ) -> list[CopiedFrom | None]:
        """Find what the next tokens of rows of the last step were copied from; see `StepVotes.copied_from`."""
        if self.votes is None:
            return [None] * len(tokens)
        return self.votes.copied_from(rows, indices, tokens, log_probabilities)

    def copied_shares(
        self, indices: Sequence[int], tokens: Sequence[int], log_probabilities: Sequence[float]
    ) -> list[float]:
        """Find how much of the next tokens was copied by retrieval; see `StepVotes.copied_shares`."""
        if self.votes is None:
            return [0.0] * len(tokens)
        return self.votes.copied_shares(indices, tokens, log_probabilities)

    def trust(self, row: Row) -> tuple[float, ...] | None:
        """Trust in each expert of a row that was read; None if it copies nothing from neighbors or datastore."""
        return row.trust if self.votes is not None and self.votes.retrieves(row) else None

    # --- a pass -------------------------------------------------------------------------------------------------------

    def _pass_of(self, rows: list[Row], longest: int) -> Span:
        """Return the pass that reads the next part of rows, of at most `longest` tokens each where no window ends it.

        From here on, these tokens count as read.
        """
        rows = sorted(rows, key=lambda row: row.slot)
        starts = np.array([row.num_read for row in rows])
        share = max(self.m, min(longest, WINDOW_TOKENS // len(rows)))
        most = [self.m - (row.num_read + 1) % self.m if self._reads_neighbors(row) else share for row in rows]
        # A draft is read at once.
        counts = [min(row.num_unread, max(1 + len(row.draft), room)) for row, room in zip(rows, most, strict=True)]
        width = max(counts)
        tokens = np.zeros((len(rows), width), dtype=np.int64)
        for new, row, count in zip(tokens, rows, counts, strict=True):
            new[:count] = row.unread[:count]
            row.num_read += count
        return self.layers.span(rows, tokens, starts, counts)
