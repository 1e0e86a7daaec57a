"""Generation: the same seed, the same text; neighbors are asked for at chunk boundaries and nowhere else."""

import numpy as np
import pytest
import torch

from indexing.store.errors import InputError
from retro.decoding import Decoder
from retro.device import place
from retro.generation import GenerationSettings, generate
from retro.model import ModelSettings, Retro

M = 4
FLOAT32 = place("cpu", "float32")


@pytest.fixture(scope="module")
def model() -> Retro:
    torch.manual_seed(0)
    return Retro(
        ModelSettings(
            vocab_size=30,
            d_model=16,
            d_ffw=32,
            num_heads=2,
            head_dim=8,
            num_layers=2,
            cca_layers=(1, 2),
            encoder_d_model=16,
            encoder_d_ffw=16,
            encoder_num_heads=1,
            encoder_head_dim=16,
            encoder_num_layers=1,
            chunk_length=M,
        )
    ).eval()


def run(model: Retro, prompt=(1, 5, 6), retrieve=None, context=64, eos_id=-1, **settings) -> list[int]:
    """The tokens that continue one prompt."""
    settings = GenerationSettings(**{"max_tokens": 12, **settings})
    decoder = Decoder(model, FLOAT32, context, retrieve)
    steps = generate(decoder, [np.array(prompt)], settings, decode=decode, eos_id=eos_id)
    return [piece.token for (piece,) in steps]


def decode(tokens) -> str:
    """A letter for each token."""
    return "".join(chr(ord("A") + token) for token in tokens)


class Retrieve:
    """Answers every chunk with neighbors that hold one token, and remembers what it was asked."""

    def __init__(self, token: int) -> None:
        self.token, self.asked = token, []

    def __call__(self, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.asked.extend(chunks.tolist())
        return np.full((len(chunks), 2, 2 * M), self.token), np.full((len(chunks), 2), 2 * M)


def test_the_same_seed_gives_the_same_tokens_and_another_one_others(model: Retro) -> None:
    assert run(model, seed=1) == run(model, seed=1)
    assert run(model, seed=1, max_tokens=30) != run(model, seed=2, max_tokens=30)


def test_temperature_zero_takes_the_likeliest_token_as_does_top_k_one(model: Retro) -> None:
    tokens = [1, 5, 6]
    for token in run(model, temperature=0):
        with torch.no_grad():
            assert token == int(model(torch.tensor([tokens]))[0, -1].argmax())
        tokens.append(token)
    assert run(model, temperature=0) == run(model, temperature=1.0, top_k=1) == run(model, temperature=1.0, top_p=1e-6)


def test_every_full_chunk_asks_once_with_its_own_tokens(model: Retro) -> None:
    retrieve = Retrieve(7)
    tokens = [1, 5, 6, *run(model, retrieve=retrieve)]
    full = (len(tokens) - 1) // M  # the last token is not read again
    assert retrieve.asked == [tokens[u * M : (u + 1) * M] for u in range(full)]


def test_neighbors_change_the_distribution_only_after_their_chunk_is_full(model: Retro) -> None:
    first, second = (run(model, retrieve=Retrieve(token), max_tokens=1, prompt=(1, 2, 3)) for token in (7, 20))
    assert first == second
    draws = {token: run(model, retrieve=Retrieve(token), max_tokens=40, seed=3) for token in (7, 20)}
    assert draws[7][0] == draws[20][0]
    assert draws[7] != draws[20]


def test_a_full_context_drops_whole_chunks_and_goes_on(model: Retro) -> None:
    retrieve = Retrieve(7)
    assert len(run(model, retrieve=retrieve, context=2 * M, max_tokens=25)) == 25
    assert len(retrieve.asked) == (3 + 24) // M


def test_the_end_of_the_document_ends_the_text(model: Retro) -> None:
    free = run(model, temperature=0)
    assert run(model, temperature=0, eos_id=free[3]) == free[: free.index(free[3]) + 1]


def test_impossible_settings_are_refused(model: Retro) -> None:
    with pytest.raises(InputError, match=r"generation\.max_tokens"):
        GenerationSettings(max_tokens=0)
    with pytest.raises(InputError, match=r"generation\.top_p"):
        GenerationSettings(top_p=0)
