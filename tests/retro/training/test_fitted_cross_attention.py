"""Fitted cross-attention copies from neighbors at once, keeps the decoder and does no harm without copies."""

import pytest
import torch

from retro.device import choose_placement
from retro.model.inputs import Inputs
from retro.model.loss import loss
from retro.model.retro import Retro
from retro.model.settings import AttentionSettings, EncoderSettings, ModelSettings, RetrievalSettings, updated
from retro.training.fitted_cross_attention import can_be_fitted, fit_copying

M, CHUNKS, ROWS, VOCABULARY = 16, 6, 8, 60
SETTINGS = ModelSettings(
    vocab_size=VOCABULARY,
    chunk_length=M,
    d_model=48,
    d_ffw=64,
    attention=AttentionSettings(num_heads=2, head_dim=32, max_positions=M * CHUNKS, smeared_tokens=3),
    num_layers=3,
    retrieval=RetrievalSettings(cca_layers=(2, 3), smeared_keys=True),
    encoder=EncoderSettings(d_model=40, d_ffw=48, num_heads=2, head_dim=16, num_layers=2, cca_layers=(1,)),
    shared_embeddings=True,
    copying_init=True,
)
CASES = {
    "rope": {},
    "no distances": {"attention.positions": "learned", "norm": "layer"},
    "Transformer-XL": {"attention.positions": "transformer-xl"},
    "one token before": {"attention.smeared_tokens": 1},
    "norms of queries": {"attention.qk_norm": True},
    "grouped queries": {"attention.num_kv_heads": 1},
    "own output layer": {"tied_embeddings": False},
    "muP": {"init": "mup", "mup_base_width": 24},
}
HERE = choose_placement("cpu", "float32")


def make_batch(*, telling: bool) -> Inputs:
    """Random text. One neighbor of each chunk is the chunk and its continuation, or random if not `telling`."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (ROWS, M * CHUNKS))
    chunks = tokens.unflatten(1, (CHUNKS, M))
    following = torch.cat((chunks, chunks.roll(-1, 1)), dim=2)
    others = torch.randint(VOCABULARY, following.shape)
    neighbors = torch.stack((others, following if telling else others.flip(-1)), dim=2)
    return Inputs(tokens, None, neighbors, labels=tokens.roll(-1, 1))


@torch.no_grad()
def mean_loss(model: Retro, batch: Inputs, *, on: bool) -> float:
    hidden = model.hidden(batch if on else batch.off())[0]
    return float(loss(hidden, model.output_weight, batch.labels))


@pytest.fixture(params=CASES)
def model(request: pytest.FixtureRequest) -> Retro:
    torch.manual_seed(1)
    return Retro(updated(SETTINGS, CASES[request.param])).eval()


def test_fitting_lowers_the_loss_on_and_keeps_logits_off(model: Retro) -> None:
    batch = make_batch(telling=True)
    off = model(Inputs(batch.tokens))
    fit_copying(model, batch, HERE)
    assert torch.equal(model(Inputs(batch.tokens)), off)
    assert mean_loss(model, batch, on=True) < mean_loss(model, batch, on=False) - 0.25


def test_fitting_does_no_harm_if_neighbors_are_random(model: Retro) -> None:
    batch = make_batch(telling=False)
    fit_copying(model, batch, HERE)
    assert mean_loss(model, batch, on=True) <= mean_loss(model, batch, on=False) + 1e-4


def test_heads_that_rotate_all_features_do_no_harm() -> None:
    model, batch = (
        Retro(updated(SETTINGS, {"attention.head_dim": 2, "attention.num_heads": 8})).eval(),
        make_batch(telling=True),
    )
    fit_copying(model, batch, HERE)
    assert mean_loss(model, batch, on=True) <= mean_loss(model, batch, on=False) + 1e-4


def test_fitting_needs_smeared_keys_copying_init_and_cross_attention() -> None:
    assert can_be_fitted(Retro(SETTINGS))
    for without in ({"retrieval.smeared_keys": False}, {"copying_init": False}, {"retrieval.cca_layers": ()}):
        assert not can_be_fitted(Retro(updated(SETTINGS, without)))
