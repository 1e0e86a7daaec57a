"""Dependencies between the model's inputs and outputs, tested by changing inputs and by gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retro.batch.inputs import Inputs
from tests.retro.small_model import (
    DOCUMENTS,
    B,
    K,
    M,
    R,
    T,
    U,
    V,
    batch,
    build,
    cached_model,
    embedding_gradients,
    every_scheme_and_reader,
    few,
    first_difference,
    logits,
    loss_of,
    neighbor_table,
)

# ------------------------------------------------------------------------------------------------------- causality


@every_scheme_and_reader
@given(chunk=st.integers(0, U - 1), row=st.integers(0, B - 1), neighbor=st.integers(0, K - 1))
@few
def test_a_neighbor_of_chunk_u_affects_no_logit_before_the_chunks_last_token(scheme, chunk, row, neighbor):
    tokens, neighbors, _ = batch(chunk)
    changed = neighbors.clone()
    changed[row, chunk, neighbor] = (changed[row, chunk, neighbor] + 1) % V
    before = logits(cached_model(scheme), tokens, None, neighbors)
    after = logits(cached_model(scheme), tokens, None, changed)
    assert first_difference(before, after) == (chunk + 1) * M - 1
    assert torch.equal(before[1 - row], after[1 - row])


@every_scheme_and_reader
@given(position=st.integers(0, T - 1), row=st.integers(0, B - 1))
@few
def test_a_token_affects_no_earlier_logit(scheme, position, row):
    tokens, neighbors, lengths = batch(position)
    changed = tokens.clone()
    changed[row, position] = (changed[row, position] + 1) % V
    before = logits(cached_model(scheme), tokens, None, neighbors, lengths)
    after = logits(cached_model(scheme), changed, None, neighbors, lengths)
    assert first_difference(before, after) == position
    assert torch.equal(before[1 - row], after[1 - row])


@every_scheme_and_reader
def test_gradients_reach_only_earlier_tokens_and_neighbors_of_finished_chunks(scheme):
    model = build(scheme, tied_embeddings=False)  # untied, so the embedding's gradients come from the inputs alone
    tokens = torch.arange(T)[None]  # every position and every neighbor has unique ids
    neighbors = (T + torch.arange(U)[:, None, None] * K + torch.arange(K)[:, None]).expand(1, U, K, R)
    output = model(Inputs(tokens, None, neighbors)).square().sum(-1)[0]
    for position in range(T):
        token_gradients = embedding_gradients(model, output[position], model.embedding.weight)[:T]
        assert (token_gradients[: position + 1] > 0).all()
        assert (token_gradients[position + 1 :] == 0).all()
        readable = (position + 1) // M  # chunks whose last token is at or before this position
        if readable:
            neighbor_gradients = embedding_gradients(model, output[position], neighbor_table(model))[T:]
            assert (neighbor_gradients[: readable * K] > 0).all()
            assert (neighbor_gradients[readable * K :] == 0).all()


@every_scheme_and_reader
def test_rows_of_a_batch_are_independent(scheme):
    model = build(scheme, tied_embeddings=False)
    _, neighbors, lengths = batch()
    tokens = torch.arange(B * T).view(B, T)
    neighbors = neighbors % 25 + torch.tensor([0, 25]).view(B, 1, 1, 1)
    output = model(Inputs(tokens, None, neighbors, lengths)).square().sum((1, 2))
    own = embedding_gradients(model, output[0], model.embedding.weight) > 0
    assert own[:T].all()
    shared = model.settings.decoder_reads  # neighbors are of this table too
    assert not own[25 if shared else T :].any()
    assert not (embedding_gradients(model, output[0], neighbor_table(model))[25:] > 0).any()


@every_scheme_and_reader
@given(num_tokens=st.integers(1, T))
@few
def test_logits_of_a_prefix_equal_those_of_the_whole(scheme, num_tokens):
    tokens, neighbors, lengths = batch()
    documents = torch.tensor([[0, 0, 0, 0], [4, 4, 5, 5]])
    for whole in (None, documents):
        full = logits(cached_model(scheme), tokens, whole, neighbors, lengths)
        part = None if whole is None else whole[:, : math.ceil(num_tokens / M)]
        complete = num_tokens // M
        prefix = logits(
            cached_model(scheme), tokens[:, :num_tokens], part, neighbors[:, :complete], lengths[:, :complete]
        )
        # The last token of a document reads its chunk's neighbors unless another document follows.
        compared = torch.ones(B, num_tokens, dtype=torch.bool)
        if whole is not None and num_tokens == 2 * M:
            compared[1, -1] = False
        torch.testing.assert_close(prefix[compared], full[:, :num_tokens][compared], rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------------------- missing neighbors


@every_scheme_and_reader
def test_tokens_beyond_a_neighbors_length_are_ignored(scheme):
    tokens, neighbors, lengths = batch()
    lengths[0, 1, 0] = lengths[1, 2] = 0
    missing = torch.arange(R) >= lengths[..., None]
    other = torch.where(missing, (neighbors + 7) % V, neighbors)
    model = cached_model(scheme)
    assert torch.equal(logits(model, tokens, None, neighbors, lengths), logits(model, tokens, None, other, lengths))
    model = build(scheme, tied_embeddings=False)
    encoder_gradients = torch.autograd.grad(
        model(Inputs(tokens % 10, None, torch.where(missing, 49, neighbors % 49), lengths)).square().sum(),
        neighbor_table(model),
    )[0]
    assert (encoder_gradients[49] == 0).all()


@pytest.mark.parametrize("documents", [None, [[0, 0, 1, 1], [2, 2, 2, 2]]])
@every_scheme_and_reader
def test_neighbors_without_lengths_equal_neighbors_of_full_length(scheme, documents):
    """Without lengths there is no mask, and other kernels run."""
    model, (tokens, neighbors, lengths) = cached_model(scheme), batch()
    documents = None if documents is None else torch.tensor(documents)
    full = logits(model, tokens, documents, neighbors, torch.full_like(lengths, R))
    torch.testing.assert_close(logits(model, tokens, documents, neighbors), full, rtol=1e-4, atol=1e-4)


@every_scheme_and_reader
def test_a_neighbor_of_length_zero_equals_no_neighbor(scheme):
    tokens, neighbors, lengths = batch()
    lengths[:, :, 1] = 0
    torch.testing.assert_close(
        logits(cached_model(scheme), tokens, None, neighbors, lengths),
        logits(cached_model(scheme), tokens, None, neighbors[:, :, :1], lengths[:, :, :1]),
    )


@every_scheme_and_reader
def test_retrieval_on_with_every_neighbor_masked_equals_retrieval_off(scheme):
    model = build(scheme)
    # Six sequences: products compute rows in blocks, and MKL for AVX2 rounds the rows of an incomplete block differently.
    tokens, neighbors, lengths = (part.repeat(3, *[1] * (part.dim() - 1)) for part in batch())
    off = logits(model, tokens)
    assert torch.equal(logits(model, tokens, None, neighbors, torch.zeros_like(lengths)), off)
    assert torch.equal(logits(model, tokens, None, neighbors[:, :, :0], lengths[:, :, :0]), off)
    lengths[0] = 0  # retrieval is dropped for one of the two sequences
    on = model(Inputs(tokens, None, neighbors, lengths))
    torch.testing.assert_close(on[0], off[0])
    assert not torch.allclose(on[1], off[1])
    loss_of(model, tokens, tokens, None, neighbors, lengths).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@every_scheme_and_reader
def test_gradients_are_finite_and_zero_where_every_neighbor_is_missing(scheme):
    model = build(scheme)
    tokens, neighbors, lengths = batch()
    loss_of(model, tokens, tokens, None, neighbors, torch.zeros_like(lengths)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if name.startswith(("encoder.", "cross.", "copy_head.neighbors.")):
            assert parameter.grad.eq(0).all(), name
        else:
            assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("documents", [None, [[0, 0, 1, 1], [2, 2, 2, 2], [3, 4, 4, 4]]])
@every_scheme_and_reader
def test_rows_without_neighbors_can_be_left_out(scheme, documents):
    """The last row has no neighbors: loss and gradients are those of neighbors of length 0."""
    model = build(scheme)
    tokens, neighbors, lengths = (torch.cat((a, b[:1])) for a, b in zip(batch(0), batch(1), strict=True))
    documents = None if documents is None else torch.tensor(documents)
    lengths[2] = 0
    labels, found = tokens.roll(-1, 1), []
    for num_rows in (3, 2):
        model.zero_grad()
        value = loss_of(model, labels, tokens, documents, neighbors[:num_rows], lengths[:num_rows])
        value.backward()
        logits_of_rows = logits(model, tokens, documents, neighbors[:num_rows], lengths[:num_rows])
        found.append([value.detach(), logits_of_rows, *(parameter.grad for parameter in model.parameters())])
    for whole, left_out in zip(*found, strict=True):
        torch.testing.assert_close(left_out, whole, rtol=1e-5, atol=1e-5)


@every_scheme_and_reader
def test_the_order_of_neighbors_does_not_matter(scheme):
    tokens, neighbors, lengths = batch()
    torch.testing.assert_close(
        logits(cached_model(scheme), tokens, None, neighbors, lengths),
        logits(cached_model(scheme), tokens, None, neighbors.flip(2), lengths.flip(2)),
        rtol=1e-4,
        atol=1e-5,
    )


# ----------------------------------------------------------------------------------------------------- documents


@every_scheme_and_reader
def test_documents_of_one_sequence_are_independent(scheme):
    tokens, neighbors, lengths = batch()
    model = cached_model(scheme)
    changed = tokens.clone()
    changed[0, : 2 * M] = (changed[0, : 2 * M] + 1) % V
    before = logits(model, tokens, DOCUMENTS, neighbors, lengths)
    after = logits(model, changed, DOCUMENTS, neighbors, lengths)
    assert torch.equal(before[0, 2 * M :], after[0, 2 * M :])
    assert not torch.equal(before[0, : 2 * M], after[0, : 2 * M])


@every_scheme_and_reader
def test_a_packed_document_has_the_logits_it_has_alone(scheme):
    tokens, neighbors, lengths = batch()
    together = logits(cached_model(scheme), tokens, DOCUMENTS, neighbors, lengths)[1, M:]
    alone = logits(cached_model(scheme), tokens[1:, M:], None, neighbors[1:, 1:], lengths[1:, 1:])[0]
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-5)


@every_scheme_and_reader
def test_neighbors_of_a_documents_last_chunk_do_not_reach_the_next_document(scheme):
    tokens, neighbors, lengths = batch()
    changed = neighbors.clone()
    changed[0, 1] = (changed[0, 1] + 1) % V
    model = cached_model(scheme)
    before = logits(model, tokens, DOCUMENTS, neighbors, lengths)
    assert torch.equal(before, logits(model, tokens, DOCUMENTS, changed, lengths))
    one_document = torch.zeros_like(DOCUMENTS)
    assert first_difference(
        logits(model, tokens, one_document, neighbors, lengths), logits(model, tokens, one_document, changed, lengths)
    ) == (2 * M - 1)


@every_scheme_and_reader
@given(padding=st.integers(1, M - 1))
@few
def test_padding_at_a_documents_end_affects_only_itself(scheme, padding):
    tokens, neighbors, lengths = batch()
    changed = tokens.clone()
    padded = slice(2 * M - padding, 2 * M)
    changed[0, padded] = (changed[0, padded] + 1) % V
    before = logits(cached_model(scheme), tokens, DOCUMENTS, neighbors, lengths)
    after = logits(cached_model(scheme), changed, DOCUMENTS, neighbors, lengths)
    outside = torch.ones(T, dtype=torch.bool)
    outside[padded] = False
    assert torch.equal(before[:, outside], after[:, outside])


@every_scheme_and_reader
def test_naming_a_single_document_changes_no_logit(scheme):
    tokens, neighbors, lengths = batch()
    named = logits(cached_model(scheme), tokens, torch.full((B, U), 9), neighbors, lengths)
    torch.testing.assert_close(
        named, logits(cached_model(scheme), tokens, None, neighbors, lengths), rtol=1e-4, atol=1e-5
    )
