"""A model that copies from the whole datastore scores and generates with live votes what it scores with stored ones."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from indexing.store.datastore import Datastore
from indexing.suffixes.search import Match, SuffixIndex
from indexing.suffixes.votes import COLUMNS, KEPT, LENGTHS, SHARES, as_columns, read_votes
from retro.copying.rows import WholeDatastore
from retro.copying.switch import KNOWN, STAYS
from retro.inference.decoder import Decoder
from retro.inference.drafts import Account, propose
from retro.inference.generation import Batch, generate
from retro.inference.settings import GenerationSettings
from tests.retro.inference.test_decoder import FLOAT32, retriever, uncached
from tests.retro.small_model import M, Together, V, build

HEADS = {
    "datastore": {"copy_head.datastore": True},
    "all": {"copy_head.datastore": True, "copy_head.context": True, "copy_head.neighbors": True},
    "without cross-attention": {"copy_head.datastore": True, "retrieval.cca_layers": ()},
}


def test_live_votes_of_held_out_documents_are_the_stored_ones(voting_datastore: Datastore) -> None:
    split, index = voting_datastore.valid, SuffixIndex.open(voting_datastore.folder)
    equal = list[bool]()
    for first, stop in split.chunk_ranges(np.arange(split.num_documents)):
        real = np.arange(split.chunk_length) < split.lengths.read(first, stop)[:, None]
        text, stored = split.tokens.read(first, stop)[real], as_columns(read_votes(split, np.arange(first, stop))[real])
        live = index.votes(text)
        assert np.array_equal(live[:, 0], stored[:, 0])
        assert np.array_equal(index.votes(text, 5), live[5:])
        assert np.array_equal(index.last_votes([text[:stop] for stop in (9, 1, len(text))]), live[[8, 0, -1]])
        equal += (live == stored).all(axis=1).tolist()
    assert np.mean(equal) > 0.9  # of more than 32 occurrences others may be counted


class Votes:
    """Random votes that depend on the last three tokens only."""

    def votes(self, text: np.ndarray, first: int = 0) -> np.ndarray:
        return find_votes(text, first)

    def last_votes(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([find_votes(text, len(text) - 1) for text in texts])

    def longest_match(self, text: np.ndarray) -> Match:
        return Match(KNOWN, ())


class Unknown(Votes):
    """Votes for texts that end otherwise than all of the datastore."""

    def longest_match(self, text: np.ndarray) -> Match:
        return Match(3, ())


class Refuses:
    def votes(self, text: np.ndarray, first: int = 0) -> np.ndarray:
        raise AssertionError("asked")

    def last_votes(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        raise AssertionError("asked")

    def longest_match(self, text: np.ndarray) -> Match:
        raise AssertionError("asked")


def find_votes(text: np.ndarray, first: int) -> np.ndarray:
    votes = np.zeros((len(text) - first, COLUMNS), np.int64)
    for row, end in zip(votes, range(first + 1, len(text) + 1), strict=True):
        drawn = np.random.default_rng(text[max(0, end - 3) : end])
        row[0], row[1 : 1 + KEPT] = drawn.integers(0, 40), drawn.permutation(V)[:KEPT]
        of_lengths = row[1 + KEPT :].reshape(len(LENGTHS), 1 + KEPT)
        of_lengths[:, 0], of_lengths[:, 1:] = drawn.integers(1, 9), drawn.integers(1, 1 + SHARES // KEPT, KEPT)
        of_lengths *= row[0] >= np.array(LENGTHS)[:, None]
        row *= row[0] > 10
    return votes


def together(name: str, datastore: WholeDatastore | None, k: int = 2) -> Together:
    model = build(**HEADS[name])
    made = Together(model, FLOAT32, 8 * M, retriever(k))
    made.decoder = Decoder(model, FLOAT32, 8 * M, datastore)
    return made


@pytest.mark.parametrize("name", HEADS)
def test_the_cached_decoder_equals_a_full_pass(name: str) -> None:
    drawn, rows = (
        np.random.default_rng(0),
        [np.random.default_rng(1).integers(0, V, length) for length in (1, M, 3 * M - 1)],
    )
    decoder = together(name, Votes())
    logits = decoder.read(rows)
    for step in range(2 * M):
        model = decoder.decoder.model
        expected = torch.stack([uncached(model, row, retriever(2), step, votes=find_votes) for row in rows])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        new = [drawn.integers(0, V, 1) for _ in rows]
        rows = [np.concatenate(row) for row in zip(rows, new, strict=True)]
        logits = decoder.read(new)


def test_retrieval_off_asks_nothing() -> None:
    row = np.random.default_rng(1).integers(0, V, 3 * M)
    made = Together(build(**HEADS["all"]), FLOAT32, 8 * M, None)
    made.decoder = Decoder(made.decoder.model, FLOAT32, 8 * M, Refuses())
    torch.testing.assert_close(made.read([row])[0], uncached(made.decoder.model, row, None), rtol=1e-4, atol=1e-4)


def test_a_row_with_copy_strength_0_generates_as_without_retrieval_next_to_others() -> None:
    model = build(**HEADS["all"] | {"retrieval.cca_layers": ()})  # nothing else reads neighbors
    decoder, prompt = Decoder(model, FLOAT32, 8 * M, Votes()), np.random.default_rng(1).integers(0, V, 3 * M - 1)
    strengths = (0.0, 1.0, 0.5)
    rows = [decoder.add(prompt, retriever(2), copy_strength=strength) for strength in strengths]
    rows += [decoder.add(prompt, retriever(2)), decoder.add(prompt)]
    for _ in range(2 * M):
        none, whole, half, default, off = decoder.read(rows)
        torch.testing.assert_close(none, off)
        assert torch.equal(whole, default)
        assert not torch.equal(whole, half)
        assert not torch.equal(half, off)
        for row in rows:
            decoder.append(row, int(whole.argmax()))


def test_copying_fades_with_each_generated_token_unless_the_prompt_ends_as_a_text_of_the_datastore() -> None:
    model, prompt = build(**HEADS["without cross-attention"]), np.random.default_rng(1).integers(0, V, 2 * M)
    decoders = [Decoder(model, FLOAT32, 64 * M, votes) for votes in (Votes(), Unknown())]
    rows = [(decoder, decoder.add(prompt, retriever(2)), decoder.add(prompt)) for decoder in decoders]
    copied = list[tuple[float, ...]]()
    for _ in range(40):
        logits = [decoder.read([on, off]) for decoder, on, off in rows]
        copied.append(tuple(float((on.exp() - off.exp()).abs().sum()) for on, off in logits))
        for decoder, *both in rows:
            for row in both:
                decoder.append(row, int(logits[0][0].argmax()))
    assert copied[0][0] == copied[0][1] > 0
    assert all(fading < known for known, fading in copied[1:] if known)
    last = [fading / known for known, fading in copied if known][-1]
    assert last == pytest.approx(STAYS**39, rel=0.3)  # experts copy with different strengths
    again = Decoder(model, FLOAT32, 64 * M, Unknown())  # as after a step that failed
    row = again.add(rows[1][1].tokens, retriever(2), rows[1][1].trust, num_generated=40)
    decoder, on, _ = rows[1]
    torch.testing.assert_close(again.read([row]), decoder.read([on]), rtol=1e-4, atol=1e-4)


def test_the_copied_share_of_a_token_is_what_its_probability_has_from_retrieval() -> None:
    decoder, shares = Decoder(build(**HEADS["without cross-attention"]), FLOAT32, 8 * M, Votes()), list[float]()
    prompt = np.random.default_rng(1).integers(0, V, 2 * M)
    rows = [decoder.add(prompt, retriever(2)), decoder.add(prompt)]
    for _ in range(2 * M):
        on, off = decoder.read(rows)
        ratio = (on - off).exp()  # the least: a token that nothing votes for
        found = decoder.copied_shares([0] * V + [1] * V, [*range(V)] * 2, [*on.tolist(), *off.tolist()])
        np.testing.assert_allclose(found[:V], (1 - ratio.min() / ratio).tolist(), atol=1e-4)
        assert not any(found[V:])
        shares += found
        for row in rows:
            decoder.append(row, int(on.argmax()))
    assert max(shares) > 0.05
    assert [decoder.trust(row) is not None for row in rows] == [True, False]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_the_datastore_change_no_token(name: str, temperature: float) -> None:
    prompts = [np.random.default_rng(1).integers(0, V, length) for length in (3, 3 * M - 1)]
    model, found = build(**HEADS[name]), []
    for drafts in (False, True):
        settings = GenerationSettings(max_tokens=3 * M, temperature=temperature, seed=3, drafts=drafts)
        batch = Batch(Decoder(model, FLOAT32, 8 * M, Votes()), lambda tokens: " ".join(map(str, tokens)), eos_id=-1)
        steps = list(generate(batch, prompts, settings, [retriever(2)] * 2))
        tokens = [[token.token for step in steps for token in step if token.row == row] for row in range(2)]
        found.append(tokens)
    assert found[0] == found[1]
    assert all(len(tokens) == 3 * M for tokens in found[0])


def test_a_text_of_the_datastore_is_drafted_as_it_stands(voting_datastore: Datastore) -> None:
    split, index = voting_datastore.train, SuffixIndex.open(voting_datastore.folder)
    equal = list[bool]()
    for first, stop in split.chunk_ranges(np.arange(10)):
        real = np.arange(split.chunk_length) < split.lengths.read(first, stop)[:, None]
        text = split.tokens.read(first, stop)[real].astype(np.int64)
        found = propose(text[:20], Account().rates, datastore=index, most=4)
        equal += (found.tokens == text[20 : 20 + len(found.tokens)]).tolist()
    assert len(equal) >= 20
    assert np.mean(equal) > 0.9
