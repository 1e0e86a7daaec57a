"""The options of the model: precision, attention, positions, initialization, dropout; and that a model learns to copy."""

import math
import re

import pytest
import torch

from indexing.store.errors import InputError
from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL
from retro.model.retro import Retro
from retro.model_settings import AttentionSettings, EncoderSettings, ModelSettings, RetrievalSettings, updated
from tests.retro.small_model import (
    DOCUMENTS,
    SETTINGS,
    B,
    M,
    T,
    V,
    batch,
    build,
    cached_model,
    embedding_gradients,
    every_scheme,
    first_difference,
    logits,
    plain_loss,
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
    exact = model(Inputs(tokens, DOCUMENTS, neighbors, lengths))
    with torch.autocast("cpu", torch.bfloat16):
        training = model(Inputs(tokens, DOCUMENTS, neighbors, lengths))
        single = model(Inputs(tokens, None, neighbors, lengths))
        evaluating = logits(model, tokens, DOCUMENTS, neighbors, lengths)
    scale = exact.std()
    for rounded in (training, evaluating):
        assert (rounded.float() - exact).abs().mean() < 0.05 * scale
    assert (single.float() - model(Inputs(tokens, None, neighbors, lengths))).abs().mean() < 0.05 * scale
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
        {"num_layers": 0},
        {"dropout": 1.0},
        {"activation": "relu"},
        {"attention.smeared_tokens": -1},
        {"chunk_length": 64, "attention.smeared_tokens": 65},
        {"attention.num_kv_heads": 3},
        {"attention.max_positions": 0},
        {"mup_base_width": 0},
        {"norm_eps": 0.0},
        {"rope.theta": 0.0},
        {"rope.partial_rotary_factor": 0.33},
        {"rope.high_freq_factor": 1.0},
        {"retrieval.positions": "learned"},
        {"retrieval.positions": "absolute"},
    ],
)
def test_invalid_settings_are_rejected_with_their_key(wrong):
    key, value = list(wrong.items())[-1]
    with pytest.raises(InputError) as refusal:
        updated(ModelSettings(), wrong)
    assert re.match(rf"model\.{key} = ['\"]?{re.escape(str(value))}['\"]?: should be ", str(refusal.value))


def test_an_odd_width_is_rejected_for_transformer_xl_only():
    ModelSettings(d_model=33)
    ModelSettings(
        attention=AttentionSettings(head_dim=33, positions="transformer-xl"),
    )
    with pytest.raises(ValueError, match=r"model\.d_model = 33.*transformer-xl"):
        ModelSettings(d_model=33, attention=AttentionSettings(positions="transformer-xl"))


def test_retrieval_positions_determine_the_checks_of_the_encoder():
    ModelSettings(attention=AttentionSettings(positions="alibi", head_dim=33), encoder=EncoderSettings(head_dim=33))
    with pytest.raises(ValueError, match=r"model\.encoder\.head_dim = 33.*rope"):
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
    output = model(Inputs(torch.arange(T)[None], documents)).square().sum(-1)[0]
    for position in range(T):
        sees = embedding_gradients(model, output[position], model.embedding.weight)[:T] > 0
        first = max(0, position - layers * (window - 1), 3 * M if documents is not None and position >= 3 * M else 0)
        assert sees.nonzero().flatten().tolist() == list(range(first, position + 1))


def test_a_parallel_feed_forward_block_reads_the_input_of_the_attention():
    tokens, neighbors, lengths = batch()
    model = build("neox", num_layers=1, **{"retrieval.cca_layers": (1,)})
    h = model.embed(tokens)
    attended, _, _ = model.run_layers(h, None, Inputs(tokens, None, neighbors, lengths))
    block = model.feed_forward["0"]
    added = block.block(block.norm(h))
    torch.nn.init.zeros_(block.block.down_proj.weight)
    torch.nn.init.zeros_(block.block.down_proj.bias)
    torch.testing.assert_close(attended, model.run_layers(h, None, Inputs(tokens, None, neighbors, lengths))[0] + added)


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
    with pytest.raises(ValueError, match=r"neighbors has 3 .* 16 tokens.* 4"):
        cached_model("rope")(Inputs(tokens, None, neighbors[:, :3]))
    with pytest.raises(ValueError, match=r"documents has 4 .* 11 tokens.* 3"):
        cached_model("rope")(Inputs(tokens[:, :11], DOCUMENTS))


def test_inputs_longer_than_the_position_table_are_rejected_with_its_setting():
    model = build(**{"attention.positions": "learned", "attention.max_positions": T - 1})
    tokens, neighbors, _ = batch()
    with pytest.raises(InputError, match=r"model\.attention\.max_positions = 15: should be 16"):
        model(Inputs(tokens))
    with pytest.raises(InputError, match=r"neighbors have 9 tokens.*learned.*they can have 8.*chunk_length = 4"):
        model(Inputs(tokens[:, :M], None, neighbors[:, :1, :, :1].expand(-1, -1, -1, 9)))


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
@pytest.mark.parametrize("scheme", ["alibi", "learned"])
def test_attention_options_compile_without_graph_breaks(scheme):
    model, (tokens, neighbors, lengths) = build(scheme, num_layers=2, **{"retrieval.cca_layers": (2,)}), batch()
    # Traced with the backward pass, but not compiled to C++, which takes a minute.
    compiled = torch.compile(model.hidden, fullgraph=True, dynamic=False, backend="aot_eager")
    for documents in (None, DOCUMENTS):
        expected = model.hidden(Inputs(tokens, documents, neighbors, lengths))[0]
        torch.testing.assert_close(
            compiled(Inputs(tokens, documents, neighbors, lengths))[0], expected, rtol=1e-4, atol=1e-4
        )


def test_the_baseline_has_no_encoder_and_ignores_neighbors():
    model = build(**{"retrieval.cca_layers": ()})
    tokens, neighbors, lengths = batch()
    assert not any(name.startswith(("encoder.", "cross.")) for name, _ in model.named_parameters())
    assert torch.equal(logits(model, tokens, None, neighbors, lengths), logits(model, tokens))


def test_smeared_attention_begins_by_copying():
    def gain(smeared_tokens: int) -> float:
        """Mean log-probability of the tokens of a text that is repeated, less that of the first time."""
        torch.manual_seed(0)
        sizes = {
            "d_model": 64,
            "attention.num_heads": 4,
            "attention.head_dim": 16,
            "attention.smeared_tokens": smeared_tokens,
        }
        model = Retro(updated(SETTINGS, {"vocab_size": 50, **sizes})).eval()
        text = torch.randint(50, (64, 2 * M), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
        log_p = logits(model, text[:, :-1]).log_softmax(-1).gather(-1, text[:, 1:, None])[..., 0]
        return (log_p[:, 2 * M + 2 :].mean() - log_p[:, 2 : 2 * M - 1].mean()).item()

    assert gain(3) > 3 * abs(gain(0))


def test_shared_embeddings_use_one_table_for_the_encoder_too():
    model = build(shared_embeddings=True)
    tables = [name for name, parameter in model.named_parameters() if parameter.shape[0] == V]
    assert tables == ["embedding.weight"]
    tokens, neighbors, lengths = batch()
    on, off = model(Inputs(tokens, None, neighbors, lengths)), model(Inputs(tokens))
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
            hidden = model.hidden(Inputs(tokens, None, neighbors if retrieval else None))[0]
            objective = plain_loss(hidden, model.output_weight, labels)
            optimizer.zero_grad()
            objective.backward()
            optimizer.step()
            value = objective.item()
        return value

    with_neighbors, without = train(True), train(False)
    assert without > 0.95 * math.log(vocabulary)
    assert with_neighbors < 0.5 * without
