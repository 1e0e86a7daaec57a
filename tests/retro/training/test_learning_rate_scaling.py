"""With muP a training step changes activations equally in wide and in narrow models."""

from typing import Any

import pytest
import torch

from retro.model.inputs import Inputs
from retro.model.loss import loss
from retro.model.retro import Retro
from retro.model.settings import updated
from retro.training.optimizer import learning_rate_factors, make_optimizer
from retro.training.settings import TrainSettings
from tests.retro.small_model import SETTINGS, batch
from tests.retro.small_model import one_thread as one_thread  # an autouse fixture


def movement(width: int, **changes: Any) -> dict[str, float]:
    """Root mean square change of activations in three training steps of a model of the given width."""
    torch.manual_seed(0)
    sizes = {
        "d_model": width,
        "d_ffw": 2 * width,
        "attention.head_dim": width // 2,
        "num_layers": 2,
        "retrieval.cca_layers": (2,),
    }
    encoder = {"encoder.d_model": width, "encoder.d_ffw": 2 * width, "encoder.head_dim": width // 2}
    model = Retro(updated(SETTINGS, {**sizes, **encoder, "mup_base_width": 32, **changes}))
    optimizer = make_optimizer([model], TrainSettings(lr=1e-2, weight_decay=0.0), learning_rate_factors(model))
    found: dict[str, torch.Tensor] = {}
    watched = {"self-attention": model.attention["1"], "cross-attention": model.cross["2"]}
    watched |= {"feed-forward": model.feed_forward["1"], "encoder": model.encoder.feed_forward[1]}
    for name, residual in watched.items():
        residual.block.register_forward_hook(lambda _, __, output, name=name: found.__setitem__(name, output.detach()))
    tokens, neighbors, lengths = batch()

    def current_activations() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            found["logits"] = model(Inputs(tokens, None, neighbors, lengths))
        return dict(found)

    before = current_activations()
    for _ in range(3):
        loss(
            model.hidden(Inputs(tokens, None, neighbors, lengths))[0], model.output_weight, tokens.roll(-1, 1)
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = current_activations()
    return {name: (after[name] - before[name]).square().mean().sqrt().item() for name in before}


@pytest.mark.parametrize("tied", [True, False])
def test_activations_change_equally_at_every_width(tied: bool) -> None:
    """The coordinate check of Yang et al. (2022), appendix D.1."""

    def growth(**changes: Any) -> dict[str, float]:
        """Ratio of the changes in a model eight times as wide."""
        narrow, wide = (movement(width, tied_embeddings=tied, **changes) for width in (32, 256))
        return {name: wide[name] / narrow[name] for name in narrow}

    assert all(factor < 1.5 for factor in growth(init="mup").values())
    without = growth(init="depth-scaled")
    assert all(without[name] > 2.5 for name in ("self-attention", "cross-attention", "feed-forward", "encoder"))
