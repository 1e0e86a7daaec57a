"""A prefix begins as real tokens before each document, is read by every token, and is trained alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from indexing.store.errors import InputError
from retro.adapters.adapters import train_only
from retro.adapters.prefix import PREFIX, initialize_prefix
from retro.batch.inputs import Inputs
from retro.model.retro import Retro
from retro.model_settings import AttentionSettings, updated
from tests.retro.small_model import DOCUMENTS, READERS, SCHEMES, B, M, T, V, batch, build, inputs, logits, loss_of

P = 4
OTHERS = [scheme for scheme in (*SCHEMES, *READERS) if scheme != "prefix"]
"""Schemes of models without a prefix."""
ROTARY: dict[str, dict[str, Any]] = {
    "rope": {},
    "shared keys and a window": {"attention.num_kv_heads": 1, "attention.qk_norm": True},
    "partly rotated": {key: value for key, value in SCHEMES["neox"].items() if key.startswith(("rope", "attention"))},
}


def with_prefix(model: Retro, num_tokens: int = P) -> Retro:
    """The same model with a prefix in its initial state."""
    other = Retro(updated(model.settings, {"attention.prefix_tokens": num_tokens})).eval()
    other.load_state_dict(model.state_dict(), strict=False)
    torch.manual_seed(1)
    initialize_prefix(other)
    return other


def first_tokens(num_tokens: int = P) -> Tensor:
    """The random tokens of the initial prefix."""
    torch.manual_seed(1)
    return torch.randint(V, (1, num_tokens)).expand(B, -1)


@pytest.mark.parametrize("options", ROTARY.values(), ids=ROTARY)
def test_an_initial_prefix_equals_its_tokens_before_the_text(options: dict[str, Any]) -> None:
    base, tokens = build(**options), batch()[0]
    expected = logits(base, torch.cat((first_tokens(), tokens), dim=1))[:, P:]
    torch.testing.assert_close(logits(with_prefix(base), tokens), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected, logits(base, tokens), atol=0.1)


@pytest.mark.parametrize("scheme", OTHERS)
def test_packed_documents_read_a_prefix_as_documents_alone_do(scheme: str) -> None:
    model = with_prefix(build(scheme))
    tokens, neighbors, lengths = batch()
    packed = logits(model, tokens, DOCUMENTS, neighbors, lengths)
    for row in range(B):
        for document in DOCUMENTS[row].unique().tolist():
            chunks = (DOCUMENTS[row] == document).nonzero().flatten()
            own = slice(int(chunks[0]), int(chunks[-1]) + 1)
            at = slice(own.start * M, own.stop * M)
            alone = logits(model, tokens[row, at][None], None, neighbors[row, own][None], lengths[row, own][None])
            # The last token of a document reads no neighbors in a packed row.
            torch.testing.assert_close(packed[row, at][:-1], alone[0, :-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", OTHERS)
def test_every_layer_and_key_of_a_prefix_has_a_gradient_and_frozen_weights_have_none(scheme: str) -> None:
    model = with_prefix(build(scheme))
    train_only(model, "none")
    data = inputs()
    loss_of(model, data.labels, data.tokens, None, data.neighbors, data.neighbor_lengths).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (PREFIX in name)
        if parameter.grad is not None:
            sizes = parameter.grad.abs().amax(-1)  # [G, P]
            assert (sizes > 0).all()
            assert len(sizes.unique()) == sizes.numel()  # otherwise some would stay equal


def test_a_prefix_leaves_causality_as_it_is() -> None:
    model, tokens = with_prefix(build()), batch()[0]
    changed = tokens.clone()
    changed[:, T // 2] = (changed[:, T // 2] + 1) % V
    assert torch.equal(logits(model, tokens)[:, : T // 2], logits(model, changed)[:, : T // 2])


@pytest.mark.parametrize("scheme", ["rope", "reading"])
def test_bfloat16_on_a_cpu_reads_the_whole_prefix(scheme: str) -> None:
    """Its products skip keys after a block of queries, which a prefix would shift."""
    model, tokens = with_prefix(build(scheme), 3 * T), torch.arange(6 * T)[None] % V
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rounded = model(Inputs(tokens))
    torch.testing.assert_close(rounded.float(), logits(model, tokens), rtol=0.1, atol=0.3)


def test_a_model_without_a_prefix_has_no_parameters_of_one_and_a_wrong_length_is_refused() -> None:
    assert not [name for name in build().state_dict() if PREFIX in name]
    with pytest.raises(InputError, match=r"model\.attention\.prefix_tokens = -1.*0"):
        AttentionSettings(prefix_tokens=-1)
