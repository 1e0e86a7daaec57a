"""Drafts change the time of a generation, never its tokens."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retro.copying.rows import Row
from retro.device import choose_placement
from retro.inference import decoder as decoding
from retro.inference import generation
from retro.inference.decoder import DRAFTED_TOKENS, Decoder
from retro.inference.drafts import (
    LONGEST_DRAFT,
    Account,
    Guess,
    Proposal,
    longest_match,
    propose,
)
from retro.inference.generation import Batch, GeneratedToken, generate
from retro.inference.settings import GenerationSettings
from retro.model.retro import Retro
from tests.retro.inference.test_batch import SEARCHES, SETTINGS, check_equal, decode
from tests.retro.inference.test_decoder import retriever
from tests.retro.small_model import SCHEMES, M, V, build, cached_model

FLOAT32 = choose_placement("cpu", "float32")
CONTEXT = 8 * M
OTHERS: dict[str, dict[str, Any]] = {
    "experts": {"scheme": "smeared", "experts.num_experts": 4, "experts.every": 2, "experts.capacity_factor": 0.5},
    "no cross-attention": {"scheme": "copying", "retrieval.cca_layers": (), "attention.num_kv_heads": 1},
    "window": {"attention.sliding_window": 3, "retrieval.positions": "alibi", "attention.num_kv_heads": 1},
}


def model_of(scheme: str) -> Retro:
    return build(**{"scheme": "rope", **OTHERS[scheme]}) if scheme in OTHERS else cached_model(scheme)


# --- the proposal ----------------------------------------------------------------------------------------------------


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int64)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=30), st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_the_longest_match_is_that_of_a_loop_and_the_last_of_several(source: list[int], tokens: list[int]) -> None:
    def length(end: int) -> int:
        pairs = zip(reversed(source[: end + 1]), reversed(tokens), strict=False)
        equal = [one == other for one, other in pairs][:16]
        return equal.index(False) if False in equal else len(equal)

    lengths = [length(end) for end in range(len(source) - 1)]
    found, following = longest_match(array(*source), array(*tokens))
    assert found == max(lengths)
    if found:
        end = max(end for end, own in enumerate(lengths) if own == found)
        assert following == source[end + 1]


TEXT, NEIGHBORS, DATASTORE = slice(0, 5), slice(5, 10), slice(10, 16)


def rates(text: float = 0.0, neighbors: float = 0.0, datastore: float = 0.0) -> list[float]:
    return [text] * 5 + [neighbors] * 5 + [datastore] * 6


class Votes:
    """A datastore in which `following` has a share of the votes after a match of the `number`th length."""

    def __init__(self, following: int, fifteenths: int, number: int) -> None:
        self.texts, self._votes = list[list[int]](), np.zeros((1, 32), np.int64)
        self._votes[0, 1:4] = 99, following, 98
        of_lengths = self._votes[0, 4:].reshape(7, 4)
        of_lengths[:number] = 5, 15, 0, 0  # shorter matches agree on another token
        of_lengths[number] = 1, 0, fifteenths, 15 - fifteenths

    def last_votes(self, texts: list[np.ndarray]) -> np.ndarray:
        self.texts += [text.tolist() for text in texts]
        return self._votes


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    assert propose(array(7, 1, 2, 1, 2), rates(0.9)).tokens.tolist() == [1, 2, 1, 2, 1, 2, 1, 2]


def test_of_the_guesses_for_a_place_that_of_the_better_source_is_proposed() -> None:
    text, neighbors = array(1, 2, 9, 1, 2, 3, 1, 2), [array(5, 6), array(3, 1, 2, 8, 4)]
    by_text, by_neighbors = propose(text, rates(0.9, 0.8), neighbors), propose(text, rates(0.8, 0.9), neighbors)
    assert by_text.tokens.tolist()[:4] == [3, 1, 2, 3]
    assert by_neighbors.tokens.tolist() == [8, 4], "nothing follows the last token of the neighbor, nor occurs before"
    assert by_neighbors.guesses[0] == by_text.guesses[0] == [Guess(1, 3), Guess(6, 8)]
    assert propose(array(1, 2, 3), rates(0.9)).tokens.tolist() == [], "no token equals the last one"
    assert propose(array(4), rates(0.9, 0.9), [array(5, 4)]).tokens.tolist() == [], "nothing follows the match"


@pytest.mark.parametrize(("fifteenths", "agree"), [(7, 0), (8, 1), (11, 1), (12, 2), (15, 2)])
@pytest.mark.parametrize(("number", "is_long"), [(0, 0), (5, 0), (6, 1)])
def test_the_votes_of_the_longest_match_in_the_datastore_are_a_guess(
    fifteenths: int, agree: int, number: int, is_long: int
) -> None:
    following = 7 if fifteenths > 7 else 98  # 8 of 15 are for another token
    datastore = Votes(7, fifteenths, number)
    found = propose(array(1), rates(datastore=0.9), datastore=datastore, most=2)
    kind = DATASTORE.start + 3 * is_long + (1 if following == 98 else agree)
    assert found.guesses[0] == [Guess(kind, following)]
    assert datastore.texts == [[1], [1, following]], "the second place is searched as if the first guess were right"


def test_no_place_is_searched_that_is_hardly_reached() -> None:
    datastore = Votes(7, 15, 6)
    assert propose(array(1), rates(datastore=0.3), datastore=datastore).chances == pytest.approx([0.3, 0.09, 0.027])
    assert len(datastore.texts) == 3


def matches(length: int) -> Proposal:
    """Guesses of the text itself, after matches of a length, which say 0, 1, 2 …; their chances are `chances`."""
    kind = min(4, length.bit_length() - 1)
    tokens = np.arange(LONGEST_DRAFT)
    return Proposal(tokens, np.zeros(LONGEST_DRAFT), [[Guess(kind, token)] for token in tokens.tolist()])


def worth(account: Account, length: int, costs: np.ndarray) -> int:
    """Tokens that are read of `matches`."""
    proposal = matches(length)
    rate = account.rates[proposal.guesses[0][0].kind]
    return account.worth_reading(proposal._replace(chances=rate ** np.arange(1, 1 + LONGEST_DRAFT)), costs)


PACKED = np.array([0.0, 0.03, 0.11, 0.16, 0.29, 0.36, 0.49, 0.53, 0.66])
PLAIN = np.array([0.0, 0.58, 0.90, 0.37, 0.53, 0.54, 0.70, 0.58, 0.75])
"""Costs of drafts that were once measured, with packed weights and with plain ones, whose products of two and of three
rows are slower than those of four."""


@pytest.fixture(autouse=True)
def same_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same drafts on every processor."""
    monkeypatch.setattr(generation, "draft_costs", lambda _: PLAIN)


def test_drafts_of_a_text_grow_while_they_are_right_end_after_errors_and_begin_again_with_right_proposals() -> None:
    text = Account()
    assert [worth(text, length, PACKED) for length in (1, 2, 4, 8, 16)] == [1, 1, 2, 3, 4]
    for _ in range(4):
        text.update(matches(8), range(LONGEST_DRAFT), 0.0)
    assert worth(text, 64, PACKED) == LONGEST_DRAFT
    for _ in range(40):
        text.update(matches(8), [9], 0.0)
    assert worth(text, 8, PACKED) == 0
    assert worth(text, 4, PACKED) == 2, "matches of other lengths have their own rate"
    for _ in range(3):  # no draft was read: each step compares one token
        text.update(matches(8), [0], 0.0)
    assert worth(text, 8, PACKED) > 0


@pytest.mark.parametrize("costs", [PACKED, PLAIN, 2 * PACKED, 3 * PLAIN])
@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 16), st.integers(0, LONGEST_DRAFT)), min_size=48, max_size=200))
def test_drafts_never_make_a_text_of_48_tokens_two_percent_longer(costs: np.ndarray, steps: list[Any]) -> None:
    """Whatever is right: of each match some first tokens are, also where its draft was not read."""
    text, passes, length = Account(), 0.0, 0
    for matched, num_right in steps:
        drafted = worth(text, matched, costs)
        tokens = [*range(min(drafted, num_right)), drafted if drafted < num_right else -1]
        text.update(matches(matched), tokens, costs[drafted])
        passes, length = passes + 1 + costs[drafted], length + len(tokens)
        assert length < 48 or passes * 0.982 < length


def test_a_draft_of_the_length_that_saves_most_is_read() -> None:
    sure, half = Account(10.0, rates(1.0)), Account(10.0, rates(0.5))
    assert worth(sure, 1, PLAIN) == LONGEST_DRAFT
    assert worth(half, 1, PLAIN) == 3, "two tokens cost more than three"
    assert worth(half, 1, PACKED) == 3
    assert worth(half, 1, PACKED * 6) == 1
    assert worth(half, 1, PACKED * 17) == 0
    assert sure.worth_reading(Proposal(np.arange(2), np.ones(2), []), PACKED) == 2, "no more than are proposed"
    assert worth(sure, 1, PACKED[:5]) == 4, "no more than there is room for"


def test_a_text_learns_up_to_the_first_wrong_token() -> None:
    one, other = Account(), Account()
    one.update(matches(2), [0, 1, 7, 3, 4], 0.0)
    other.update(matches(3), [0, 1, 8], 0.0)
    assert one.rates == other.rates


def test_sources_whose_guess_was_not_proposed_are_compared_too() -> None:
    text = Account()
    before = [*text.rates]
    text.update(Proposal(array(5), np.ones(1), [[Guess(1, 5), Guess(12, 6)]]), [6, 7], 0.0)
    assert text.rates[1] < before[1]
    assert text.rates[12] > before[12]


# --- generated texts -------------------------------------------------------------------------------------------------


def generated(model: Retro, prompts: list[np.ndarray], settings: GenerationSettings, k: int) -> list[GeneratedToken]:
    batch = Batch(Decoder(model, FLOAT32, CONTEXT), decode, eos_id=0)
    steps = generate(batch, prompts, settings, [SEARCHES[k]] * len(prompts), sources=True)
    return sorted((token for step in steps for token in step), key=lambda token: token.row)


@pytest.mark.parametrize("scheme", [*SCHEMES, *OTHERS])
@settings(max_examples=3, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_texts_with_drafts_equal_those_without(scheme: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model, k = model_of(scheme), int(rng.integers(len(SEARCHES)))
    repeated = [np.tile(rng.integers(0, V, rng.integers(1, 6)), 9)[: rng.integers(1, CONTEXT + 3)] for _ in range(3)]
    own = {**SETTINGS[rng.integers(len(SETTINGS))], "ignore_eos": True}
    options = GenerationSettings(max_tokens=3 * M + 1, seed=int(rng.integers(9)), **own)
    with_drafts = generated(model, repeated, options, k)
    without = generated(model, repeated, replace(options, drafts=False), k)
    assert not any(token.accepted or token.rejected for token in without)
    for found, expected in zip(with_drafts, without, strict=True):
        check_equal(found, expected)


def test_drafts_of_texts_that_repeat_are_accepted_and_those_of_others_are_counted_as_rejected() -> None:
    model, greedy = cached_model("copying"), GenerationSettings(max_tokens=40, temperature=0, ignore_eos=True)
    tokens = generated(model, [np.tile(array(3, 4, 5), 5)], greedy, 0)
    assert sum(token.accepted for token in tokens) >= 20
    batch = Batch(Decoder(model, FLOAT32, CONTEXT), decode, eos_id=0)
    batch.add(np.tile(array(3, 4, 5), 5), greedy)
    steps = 0
    while len(batch):
        new = [token for _, token in batch.step()]
        steps += bool(new)
        assert not any(token.rejected for token in new[:-1])
    assert steps < 20
    other = replace(greedy, logit_bias=((5, -100.0),))  # the draft proposes 5
    assert sum(token.rejected for token in generated(model, [np.tile(array(3, 4, 5), 5)], other, 0)) > 0


def test_tokens_have_the_distribution_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejection sampling with a fixed draft: x is accepted with p(x), else another token with p(y) / (1 - p(x))."""
    monkeypatch.setattr(decoding, "DRAFTED_TOKENS", 10_000)
    monkeypatch.setattr(generation, "draft_costs", lambda _: np.zeros(1 + LONGEST_DRAFT))
    model, prompt, count = cached_model("rope"), np.tile(array(3, 4), 6), 400
    three = tuple((token, 100.0) for token in (3, 4, 5))  # a vocabulary of three tokens
    options = GenerationSettings(max_tokens=5, temperature=3.0, logit_bias=three, top_k=3, top_p=1.0, ignore_eos=True)
    counts = []
    for drafts in (True, False):
        own = replace(options, drafts=drafts, seed=10**6 * drafts)  # other random numbers
        batch = Batch(Decoder(model, FLOAT32, CONTEXT), decode, eos_id=0)
        texts = [[] for _ in range(count)]
        for token in (token for step in generate(batch, [prompt], own, n=count) for token in step):
            texts[token.row].append(token)
        assert any(token.accepted for text in texts for token in text) == drafts
        assert any(token.rejected for text in texts for token in text) == drafts
        counts.append(Counter(tuple(token.token for token in text[3:]) for text in texts))
    assert len(counts[0]) == 9
    for pair in counts[0]:
        drafted, plain = counts[0][pair], counts[1][pair]
        assert abs(drafted - plain) < 4.5 * (drafted + plain) ** 0.5, pair


# --- the cache -------------------------------------------------------------------------------------------------------


def state(decoder: Decoder, row: Row) -> list[torch.Tensor]:
    """What the next passes read of the cache."""
    cache, slot, read = decoder.cache, row.slot, row.num_read
    lasts = [last[slot][:, LONGEST_DRAFT:] for last in (cache.last_keys, cache.last_queries)]
    chunk = cache.chunk[slot, : row.num_read % M] if row.retrieve else cache.chunk[slot, :0]
    parts = [cache.keys[slot, :, :, :read], cache.values[slot, :, :, :read], *lasts, chunk, cache.readable[slot]]
    readable = cache.readable[slot].flatten()
    return [*parts, *(kept[slot, :, :, readable] for kept in (cache.neighbor_keys, cache.neighbor_values))]


@pytest.mark.parametrize(
    ("scheme", "k"), [*((scheme, 2) for scheme in [*SCHEMES, *OTHERS]), ("rope", 0), ("copying", 0), ("window", 0)]
)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_after_right_and_wrong_drafts_logits_and_cache_are_those_without(scheme: str, k: int, seed: int) -> None:
    rng, model, search = np.random.default_rng(seed), model_of(scheme), retriever(k)
    futures = [rng.integers(0, V, 5 * M) for _ in range(3)]
    starts = [int(start) for start in rng.integers(1, 3 * M, 3)]

    def propose(row: Row, room: int, _: int) -> np.ndarray:
        """Tokens of the text; the last ones are often wrong."""
        text = futures[decoder.rows.index(row)]
        proposed = text[len(row.tokens) : -1][: rng.integers(0, 1 + room)].copy()
        proposed[rng.integers(0, 1 + len(proposed)) :] = V - 1
        return proposed

    decoder, plain = Decoder(model, FLOAT32, CONTEXT), Decoder(model, FLOAT32, CONTEXT)
    for text, start in zip(futures, starts, strict=True):
        decoder.add(text[:start], search)
        plain.add(text[:start], search)
    expected = [{} for _ in futures]  # logits by number of tokens
    while any(row.num_unread for row in plain.rows):
        for row, logits in zip(*plain.step(), strict=True):
            index = plain.rows.index(row)
            expected[index][len(row.tokens)] = logits
            if len(row.tokens) < 5 * M:
                plain.append(row, futures[index][len(row.tokens)])
    while any(row.num_unread for row in decoder.rows):
        rows, logits = decoder.step(propose)
        for row in rows:
            index, length = decoder.rows.index(row), len(row.tokens)
            own, logits = logits[: 1 + len(row.draft)], logits[1 + len(row.draft) :]
            text = futures[index][length:]
            right = next((n for n, token in enumerate(row.draft) if token != text[n]), len(row.draft))
            for number in range(right + 1):
                torch.testing.assert_close(own[number], expected[index][length + number], rtol=1e-4, atol=1e-4)
            if len(text):
                decoder.append(row, *text[: right + 1].tolist())
    for row, other in zip(decoder.rows, plain.rows, strict=True):
        assert row.num_read == other.num_read == 5 * M
        for one, two in zip(state(decoder, row), state(plain, other), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_drafts_end_where_neighbors_change_and_where_the_context_ends() -> None:
    decoder = Decoder(cached_model("rope"), FLOAT32, 2 * M)
    rooms = list[int]()
    for length in range(1, 2 * M):
        row = decoder.add(np.arange(length), retriever(1))
        decoder.read([row])
        decoder.append(row, 0)
        decoder.step(lambda _, room, __: rooms.append(room) or np.zeros(0, np.int64))
        decoder.remove(row)
    assert rooms == [*(M - 1 - length % M for length in range(2, 2 * M)), 0]
    alone = decoder.add(np.arange(3))
    decoder.read([alone])
    decoder.append(alone, 0)
    decoder.step(lambda _, room, __: rooms.append(room) or np.zeros(0, np.int64))
    assert rooms[-1] == 2 * M - 4, "without neighbors only the context ends a draft"


def test_drafts_are_shorter_in_a_larger_batch() -> None:
    decoder, rooms = Decoder(cached_model("rope"), FLOAT32, CONTEXT), list[int]()
    for number in range(12):
        decoder.add(array(number))
        rooms.clear()
        decoder.step(lambda _, room, __: rooms.append(room) or np.zeros(0, np.int64))
        decoder.step()
        for row in decoder.rows:
            if not row.num_unread:
                decoder.append(row, 0)
        assert rooms == [max(0, min(LONGEST_DRAFT, DRAFTED_TOKENS // len(rooms) - 1))] * len(rooms)
