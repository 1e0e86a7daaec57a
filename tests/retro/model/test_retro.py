"""Dependencies between the model's inputs and outputs, tested by changing inputs and by gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from indexing.store.errors import InputError
from retro.model.loss import IGNORED_LABEL, loss
from retro.model.retro import Retro
from retro.model.settings import AttentionSettings, EncoderSettings, ModelSettings, RetrievalSettings, updated
from tests.retro.small_model import (
    SETTINGS,
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
    every_scheme,
    few,
    logits,
    loss_of,
)
from tests.retro.small_model import one_thread as one_thread  # an autouse fixture


def first_difference(a: Tensor, b: Tensor) -> int:
    """First position of [B, T, V] at which two outputs differ in any bit; T if they are equal."""
    differs = (a != b).any(-1).any(0)
    return int(differs.int().argmax()) if differs.any() else T


def embedding_gradients(model: Retro, output: Tensor, table: Tensor) -> Tensor:
    """Sums of absolute gradients by token id: nonzero for the ids on which the output depends."""
    return torch.autograd.grad(output, table, retain_graph=True)[0].abs().sum(-1)


# ------------------------------------------------------------------------------------------------------- causality


@every_scheme
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


@every_scheme
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


@every_scheme
def test_gradients_reach_only_earlier_tokens_and_neighbors_of_finished_chunks(scheme):
    model = build(scheme, tied_embeddings=False)  # untied, so the embedding's gradients come from the inputs alone
    tokens = torch.arange(T)[None]  # every position and every neighbor has unique ids
    neighbors = (torch.arange(U)[:, None, None] * K + torch.arange(K)[:, None]).expand(1, U, K, R)
    output = model(tokens, None, neighbors).square().sum(-1)[0]
    for position in range(T):
        token_gradients = embedding_gradients(model, output[position], model.embedding.weight)
        assert (token_gradients[: position + 1] > 0).all()
        assert (token_gradients[position + 1 :] == 0).all()
        table = model.encoder.embedding.weight
        readable = (position + 1) // M  # chunks whose last token is at or before this position
        if readable:
            neighbor_gradients = embedding_gradients(model, output[position], table)
            assert (neighbor_gradients[: readable * K] > 0).all()
            assert (neighbor_gradients[readable * K :] == 0).all()


@every_scheme
def test_rows_of_a_batch_are_independent(scheme):
    model = build(scheme, tied_embeddings=False)
    _, neighbors, lengths = batch()
    tokens = torch.arange(B * T).view(B, T)
    neighbors = neighbors % 25 + torch.tensor([0, 25]).view(B, 1, 1, 1)
    output = model(tokens, None, neighbors, lengths).square().sum((1, 2))
    own = embedding_gradients(model, output[0], model.embedding.weight) > 0
    assert own[:T].all()
    assert not own[
        25 if model.settings.copy_head.content_width else T :
    ].any()  # keys of neighbors are of this table too
    assert not (embedding_gradients(model, output[0], model.encoder.embedding.weight)[25:] > 0).any()


@every_scheme
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


@every_scheme
def test_tokens_beyond_a_neighbors_length_are_ignored(scheme):
    tokens, neighbors, lengths = batch()
    lengths[0, 1, 0] = lengths[1, 2] = 0
    missing = torch.arange(R) >= lengths[..., None]
    other = torch.where(missing, (neighbors + 7) % V, neighbors)
    model = cached_model(scheme)
    assert torch.equal(logits(model, tokens, None, neighbors, lengths), logits(model, tokens, None, other, lengths))
    encoder_gradients = torch.autograd.grad(
        model(tokens % 10, None, torch.where(missing, 49, neighbors % 49), lengths).square().sum(),
        model.encoder.embedding.weight,
    )[0]
    assert (encoder_gradients[49] == 0).all()


@pytest.mark.parametrize("documents", [None, [[0, 0, 1, 1], [2, 2, 2, 2]]])
@every_scheme
def test_neighbors_without_lengths_equal_neighbors_of_full_length(scheme, documents):
    """Without lengths there is no mask, and other kernels run."""
    model, (tokens, neighbors, lengths) = cached_model(scheme), batch()
    documents = None if documents is None else torch.tensor(documents)
    full = logits(model, tokens, documents, neighbors, torch.full_like(lengths, R))
    torch.testing.assert_close(logits(model, tokens, documents, neighbors), full, rtol=1e-4, atol=1e-4)


@every_scheme
def test_a_neighbor_of_length_zero_equals_no_neighbor(scheme):
    tokens, neighbors, lengths = batch()
    lengths[:, :, 1] = 0
    torch.testing.assert_close(
        logits(cached_model(scheme), tokens, None, neighbors, lengths),
        logits(cached_model(scheme), tokens, None, neighbors[:, :, :1], lengths[:, :, :1]),
    )


@every_scheme
def test_retrieval_on_with_every_neighbor_masked_equals_retrieval_off(scheme):
    model = build(scheme)
    tokens, neighbors, lengths = batch()
    off = logits(model, tokens)
    assert torch.equal(logits(model, tokens, None, neighbors, torch.zeros_like(lengths)), off)
    assert torch.equal(logits(model, tokens, None, neighbors[:, :, :0], lengths[:, :, :0]), off)
    lengths[0] = 0  # retrieval is dropped for one of the two sequences
    on = model(tokens, None, neighbors, lengths)
    torch.testing.assert_close(on[0], off[0])
    assert not torch.allclose(on[1], off[1])
    loss_of(model, tokens, tokens, None, neighbors, lengths).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@every_scheme
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
@every_scheme
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


@every_scheme
def test_the_order_of_neighbors_does_not_matter(scheme):
    tokens, neighbors, lengths = batch()
    torch.testing.assert_close(
        logits(cached_model(scheme), tokens, None, neighbors, lengths),
        logits(cached_model(scheme), tokens, None, neighbors.flip(2), lengths.flip(2)),
        rtol=1e-4,
        atol=1e-5,
    )


# ----------------------------------------------------------------------------------------------------- documents

DOCUMENTS = torch.tensor([[3, 3, 4, 4], [5, 6, 6, 6]])


@every_scheme
def test_documents_of_one_sequence_are_independent(scheme):
    tokens, neighbors, lengths = batch()
    model = cached_model(scheme)
    changed = tokens.clone()
    changed[0, : 2 * M] = (changed[0, : 2 * M] + 1) % V
    before = logits(model, tokens, DOCUMENTS, neighbors, lengths)
    after = logits(model, changed, DOCUMENTS, neighbors, lengths)
    assert torch.equal(before[0, 2 * M :], after[0, 2 * M :])
    assert not torch.equal(before[0, : 2 * M], after[0, : 2 * M])


@every_scheme
def test_a_packed_document_has_the_logits_it_has_alone(scheme):
    tokens, neighbors, lengths = batch()
    together = logits(cached_model(scheme), tokens, DOCUMENTS, neighbors, lengths)[1, M:]
    alone = logits(cached_model(scheme), tokens[1:, M:], None, neighbors[1:, 1:], lengths[1:, 1:])[0]
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-5)


@every_scheme
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


@every_scheme
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


@every_scheme
def test_naming_a_single_document_changes_no_logit(scheme):
    tokens, neighbors, lengths = batch()
    named = logits(cached_model(scheme), tokens, torch.full((B, U), 9), neighbors, lengths)
    torch.testing.assert_close(
        named, logits(cached_model(scheme), tokens, None, neighbors, lengths), rtol=1e-4, atol=1e-5
    )


# -------------------------------------------------------------------------------------------- encoder and precision


@every_scheme
def test_encoded_neighbors_depend_on_their_chunk_and_not_on_each_other(scheme):
    model = cached_model(scheme)
    encoder = model.encoder
    _, neighbors, _ = batch()
    mask, h = torch.ones_like(neighbors, dtype=torch.bool), torch.randn(B, T, SETTINGS.d_model)
    with torch.no_grad():
        encoded = encoder(neighbors, mask, h, model.embedding)
        others = h.clone()
        others[0, M : 2 * M] += 1
        changed = encoder(neighbors, mask, others, model.embedding) != encoded
        alone = encoder(neighbors[:, :, 1:], mask[:, :, 1:], h, model.embedding)
    assert changed[0, 1].any(-1).all()
    changed[0, 1] = False
    assert not changed.any()
    torch.testing.assert_close(alone, encoded[:, :, 1:], rtol=1e-4, atol=1e-5)
    unconditioned = build(scheme, **{"encoder.cca_layers": ()})
    assert not any("cross" in name for name, _ in unconditioned.encoder.named_parameters())


@every_scheme
def test_bfloat16_autocast_is_close_to_float32(scheme):
    model = build(scheme)
    tokens, neighbors, lengths = batch()
    exact = model(tokens, DOCUMENTS, neighbors, lengths)
    with torch.autocast("cpu", torch.bfloat16):
        training = model(tokens, DOCUMENTS, neighbors, lengths)
        single = model(tokens, None, neighbors, lengths)
        evaluating = logits(model, tokens, DOCUMENTS, neighbors, lengths)
    scale = exact.std()
    for rounded in (training, evaluating):
        assert (rounded.float() - exact).abs().mean() < 0.05 * scale
    assert (single.float() - model(tokens, None, neighbors, lengths)).abs().mean() < 0.05 * scale
    training.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_model_made_on_the_meta_device_equals_a_directly_made_one():
    with torch.device("meta"):
        model = Retro(SETTINGS)
    model.to_empty(device="cpu")
    direct = Retro(SETTINGS)
    for either in (model, direct):
        torch.manual_seed(3)
        either.initialize()
    tokens, neighbors, lengths = batch()
    assert torch.equal(
        logits(model, tokens, None, neighbors, lengths), logits(direct, tokens, None, neighbors, lengths)
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"retrieval.cca_layers": (0, 3)},
        {"retrieval.cca_layers": (7,)},
        {"retrieval.cca_layers": (6, 3)},
        {"retrieval.cca_layers": (3, 3)},
        {"encoder.cca_layers": (3,)},
        {"attention.head_dim": 63},
        {"encoder.head_dim": 7},
        {"d_model": 0},
        {"encoder.d_ffw": -1},
        {"num_layers": 0},
        {"chunk_length": -1},
        {"dropout": 1.0},
        {"dropout": -0.1},
        {"vocab_size": -1},
        {"attention.positions": "absolute"},
        {"activation": "relu"},
        {"init": "zero"},
        {"attention.smeared_tokens": 0},
        {"chunk_length": 64, "attention.smeared_tokens": 65},
        {"attention.num_kv_heads": 3},
        {"attention.num_kv_heads": -1},
        {"attention.max_positions": 0},
        {"mup_base_width": 0},
        {"norm": "batch"},
        {"norm_eps": 0.0},
        {"attention.bias": "out"},
        {"rope.scaling": "yarn"},
        {"rope.theta": 0.0},
        {"rope.partial_rotary_factor": 0.33},
        {"rope.factor": -1.0},
        {"rope.high_freq_factor": 1.0},
        {"attention.sliding_window": -1},
        {"retrieval.positions": "learned"},
        {"retrieval.positions": "absolute"},
    ],
)
def test_invalid_settings_are_rejected_with_their_key(wrong):
    key, value = list(wrong.items())[-1]
    with pytest.raises(ValueError) as refusal:
        updated(ModelSettings(), wrong)
    assert f"model.{key} is {value!r}: set it to " in str(refusal.value)


def test_an_odd_width_is_rejected_for_transformer_xl_only():
    ModelSettings(d_model=33)
    ModelSettings(
        attention=AttentionSettings(head_dim=33, positions="transformer-xl"),
    )
    with pytest.raises(ValueError, match=r"model\.d_model is 33.*transformer-xl"):
        ModelSettings(d_model=33, attention=AttentionSettings(positions="transformer-xl"))


def test_retrieval_positions_determine_the_checks_of_the_encoder():
    ModelSettings(attention=AttentionSettings(positions="alibi", head_dim=33), encoder=EncoderSettings(head_dim=33))
    with pytest.raises(ValueError, match=r"model\.encoder\.head_dim is 33.*rope"):
        ModelSettings(
            attention=AttentionSettings(positions="alibi"),
            encoder=EncoderSettings(head_dim=33),
            retrieval=RetrievalSettings(positions="rope"),
        )


@pytest.mark.parametrize("positions", ["rope", "transformer-xl"])
@pytest.mark.parametrize("documents", [None, torch.tensor([[3, 3, 3, 4]])])
def test_a_token_reads_the_tokens_of_its_sliding_window_in_every_layer(positions, documents):
    window, layers = 3, 2
    changes = {
        "attention.sliding_window": window,
        "num_layers": layers,
        "retrieval.cca_layers": (),
        "tied_embeddings": False,
    }
    model = build(**{"attention.positions": positions}, **changes)
    output = model(torch.arange(T)[None], documents).square().sum(-1)[0]
    for position in range(T):
        sees = embedding_gradients(model, output[position], model.embedding.weight)[:T] > 0
        first = max(0, position - layers * (window - 1), 3 * M if documents is not None and position >= 3 * M else 0)
        assert sees.nonzero().flatten().tolist() == list(range(first, position + 1))


def test_a_parallel_feed_forward_block_reads_the_input_of_the_attention():
    tokens, neighbors, lengths = batch()
    model = build("neox", num_layers=1, **{"retrieval.cca_layers": (1,)})
    h = model.embed(tokens)
    attended, _, _ = model.run_layers(h, None, None, neighbors, lengths)
    block = model.feed_forward["0"]
    added = block.block(block.norm(h))
    torch.nn.init.zeros_(block.block.down_proj.weight)
    torch.nn.init.zeros_(block.block.down_proj.bias)
    torch.testing.assert_close(attended, model.run_layers(h, None, None, neighbors, lengths)[0] + added)


def test_learned_positions_create_no_chunk_tables_if_retrieval_uses_rope():
    changes = {"attention.positions": "learned", "retrieval.positions": "rope", "scaled_embeddings": False}
    model = build(**changes, **{"attention.max_positions": T})
    assert not any(name.startswith(("chunk", "encoder.position")) for name, _ in model.named_parameters())
    tokens, neighbors, _ = batch()
    expected = model.embedding(tokens) + model.position_embedding.weight[:T]
    assert torch.equal(model.embed(tokens), expected)
    turned = (logits(model, tokens, None, each) for each in (neighbors, neighbors.flip(-1)))
    assert first_difference(*turned) == M - 1


def test_a_wrong_number_of_chunks_is_rejected():
    tokens, neighbors, _ = batch()
    with pytest.raises(ValueError, match=r"3 chunks.*16 tokens complete 4"):
        cached_model("rope")(tokens, None, neighbors[:, :3])
    with pytest.raises(ValueError, match="4 columns, but 11 tokens"):
        cached_model("rope")(tokens[:, :11], DOCUMENTS)


def test_inputs_longer_than_the_position_table_are_rejected_with_its_setting():
    model = build(**{"attention.positions": "learned", "attention.max_positions": T - 1})
    tokens, neighbors, _ = batch()
    with pytest.raises(InputError, match=r"model\.attention\.max_positions is 15: set it to 16 or more"):
        model(tokens)
    with pytest.raises(InputError, match=r"neighbors have 9 tokens.*learned.*they can have 8.*chunk_length = 4"):
        model(tokens[:, :M], None, neighbors[:, :1, :, :1].expand(-1, -1, -1, 9))


def test_learned_positions_encode_the_order_of_neighbor_tokens():
    model = build(**{"attention.positions": "learned"})
    tokens, neighbors, _ = batch()
    turned = neighbors.flip(-1)
    before, after = (logits(model, tokens, None, each) for each in (neighbors, turned))
    assert first_difference(before, after) == M - 1
    torch.nn.init.zeros_(model.encoder.position_embedding.weight)
    before, after = (logits(model, tokens, None, each) for each in (neighbors, turned))
    torch.testing.assert_close(before, after)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("scheme", ["alibi", "learned"])
def test_attention_options_compile_without_graph_breaks(scheme):
    model, (tokens, neighbors, lengths) = build(scheme, num_layers=2, **{"retrieval.cca_layers": (2,)}), batch()
    # Traced with the backward pass, but not compiled to C++, which takes a minute.
    compiled = torch.compile(model.hidden, fullgraph=True, dynamic=False, backend="aot_eager")
    for documents in (None, DOCUMENTS):
        expected = model.hidden(tokens, documents, neighbors, lengths)
        torch.testing.assert_close(compiled(tokens, documents, neighbors, lengths), expected, rtol=1e-4, atol=1e-4)


def test_the_baseline_has_no_encoder_and_ignores_neighbors():
    model = build(**{"retrieval.cca_layers": ()})
    tokens, neighbors, lengths = batch()
    assert not any(name.startswith(("encoder.", "cross.")) for name, _ in model.named_parameters())
    assert torch.equal(logits(model, tokens, None, neighbors, lengths), logits(model, tokens))


def test_copying_init_predicts_what_follows_in_a_neighbor_before_training():
    def gain(**changes: bool) -> float:
        """Gain from OFF to ON in mean log-probability of the next token, which the neighbors contain."""
        torch.manual_seed(0)
        sizes = updated(
            SETTINGS,
            {
                "vocab_size": 50,
                "d_model": 64,
                "encoder.d_model": 64,
                "attention.num_heads": 4,
                "attention.head_dim": 16,
            },
        )
        model = Retro(updated(sizes, {"shared_embeddings": True, "attention.smeared_keys": True, **changes})).eval()
        text = torch.randint(50, (64, 5 * M), generator=torch.Generator().manual_seed(0))
        tokens, labels = text[:, : 4 * M], text[:, 1 : 4 * M + 1, None]
        read = text.unfold(1, 2 * M, M)[:, :, None]  # [64, 4, 1, 2M]: each chunk and the one after it
        log_p = [logits(model, tokens, None, neighbors).log_softmax(-1) for neighbors in (None, read)]
        off, on = (values.gather(-1, labels)[:, M - 1 :].mean().item() for values in log_p)
        return on - off

    assert gain(copying_init=True) > 3 * abs(gain(copying_init=False))


def test_copying_init_without_shared_embeddings_is_rejected():
    ModelSettings(copying_init=True, retrieval=RetrievalSettings(cca_layers=()))
    with pytest.raises(ValueError, match=r"model\.copying_init is True.*shared_embeddings"):
        ModelSettings(copying_init=True)


def test_shared_embeddings_use_one_table_for_the_encoder_too():
    model = build(shared_embeddings=True)
    tables = [name for name, parameter in model.named_parameters() if parameter.shape[0] == V]
    assert tables == ["embedding.weight"]
    tokens, neighbors, lengths = batch()
    on, off = model(tokens, None, neighbors, lengths), model(tokens)
    assert first_difference(on.detach(), off.detach()) == M - 1
    on.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_dropout_is_active_in_training_only():
    model = build(dropout=0.5)
    tokens, neighbors, _ = batch()
    assert torch.equal(logits(model, tokens, None, neighbors), logits(model, tokens, None, neighbors))
    model.train()
    assert not torch.equal(logits(model, tokens, None, neighbors), logits(model, tokens, None, neighbors))


# ---------------------------------------------------------------------------------------------------- loss, learning


def test_the_model_learns_to_copy_from_its_neighbors():
    """The text is random, so only neighbors help: chunk u + 1 is in chunk u's neighbor."""
    vocabulary, m, num_chunks = 16, 4, 4

    def train(retrieval: bool) -> float:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        model = Retro(updated(SETTINGS, {"vocab_size": vocabulary, "chunk_length": m, "encoder.d_model": 32}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        value = math.nan
        for _ in range(40):
            text = torch.randint(vocabulary, (32, (num_chunks + 1) * m), generator=generator)
            tokens, labels = text[:, : num_chunks * m], text[:, 1 : num_chunks * m + 1].clone()
            labels[:, : m - 1] = IGNORED_LABEL  # without neighbors
            neighbors = text[:, m:].reshape(-1, num_chunks, 1, m)
            hidden = model.hidden(tokens, None, neighbors if retrieval else None)
            objective = loss(hidden, model.output_weight, labels)
            optimizer.zero_grad()
            objective.backward()
            optimizer.step()
            value = objective.item()
        return value

    with_neighbors, without = train(True), train(False)
    assert without > 0.95 * math.log(vocabulary)
    assert with_neighbors < 0.5 * without
