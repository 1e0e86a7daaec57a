"""Match lengths equal a plain loop, the mixture is a distribution, and losses and gradients equal plain autograd."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL, TokenLosses
from retro.copying import matches as matching
from retro.copying.context import context_matches
from retro.copying.datastore import DATASTORE
from retro.copying.head import BEST_FEATURES, CopyHead, Origins
from retro.copying.matches import LONGEST, MATCH_LENGTHS, Matches, counts_by_length, match_lengths
from retro.copying.neighbors import NEIGHBORS, neighbor_matches
from retro.model.retro import Retro
from retro.model_settings import updated
from tests.retro.small_model import SETTINGS, B, K, M, R, T, U, V, agreed_votes, batch, build, loss_of, votes

FEW = 3  # ids of tokens: matches are frequent and long


def few_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(FEW, shape, generator=torch.Generator().manual_seed(seed))


def plain_length(read: list[int], source: list[int], longest: int) -> int:
    """Number of equal tokens at the ends of two texts, up to `longest`."""
    count = 0
    while count < min(longest, len(read), len(source)) and read[-1 - count] == source[-1 - count]:
        count += 1
    return count


@pytest.mark.parametrize("longest", [1, 4, 16])
def test_match_lengths_equal_a_loop(longest: int) -> None:
    read, source = few_tokens(40).tolist(), few_tokens(30, seed=1).tolist()
    read[5:25] = source[3:23]  # longer than 16
    padded = torch.tensor([-1] * (longest - 1) + read)
    expected = [[plain_length(read[: q + 1], source[: s + 1], longest) for s in range(30)] for q in range(40)]
    assert match_lengths(padded, torch.tensor(source), longest).tolist() == expected


@pytest.mark.parametrize("chunks_per_document", [1, 2, 8])
def test_context_matches_stay_in_the_document(chunks_per_document: int) -> None:
    m, num_tokens = 4, 32
    tokens = few_tokens(1, num_tokens)
    documents = (torch.arange(8) // chunks_per_document)[None]
    size, row = m * chunks_per_document, tokens[0].tolist()
    matches = context_matches(tokens, documents, m)
    for q in range(num_tokens):
        start = q // size * size
        for s in range(num_tokens):
            readable = start <= s < q
            expected = plain_length(row[start : q + 1], row[start : s + 1], LONGEST) if readable else -1
            assert matches.lengths[0, q, s] == expected
            assert not readable or matches.following[0, s] == row[s + 1]


def test_neighbor_matches_equal_a_loop() -> None:
    tokens, neighbors = few_tokens(B, T + 2), few_tokens(B, U, K, R, seed=1)
    lengths = torch.randint(0, R + 1, (B, U, K), generator=torch.Generator().manual_seed(2))
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
    matches = neighbor_matches(Inputs(tokens, documents, neighbors, lengths), M)
    assert matches.lengths.shape == (B * U, M, K * R)
    for b, u, q, k, s in torch.cartesian_prod(*(torch.arange(n) for n in (B, U, M, K, R))).tolist():
        at = (u + 1) * M - 1 + q
        if at >= T + 2:
            continue  # after the last token
        # Chunk 1 of the first row ends a document: its neighbors would be read by the next one.
        readable = s + 1 < lengths[b, u, k] and (b, u) != (0, 1)
        found = matches.lengths[b * U + u, q, k * R + s]
        # The longest match has m tokens, which are in chunk u and the next.
        expected = plain_length(tokens[b, u * M : at + 1].tolist(), neighbors[b, u, k, : s + 1].tolist(), M)
        assert found == (expected if readable else -1)
        assert not readable or matches.following[b * U + u, k * R + s] == neighbors[b, u, k, s + 1]


def test_counts_by_length_equal_a_loop() -> None:
    tokens = few_tokens(2, 40)
    labels, matches = tokens.roll(-1, 1), context_matches(tokens, None, 4)
    *counts, best_of = counts_by_length(matches, labels)
    for row, label, lengths, bests, *found in zip(
        tokens.tolist(), labels.tolist(), matches.lengths.tolist(), best_of.tolist(), *counts, strict=True
    ):
        for q, of_query in enumerate(lengths):
            best = max((of_query[s], row[s + 1]) for s in range(39))[1]
            assert bests[q] == best or not q
            for level, length in enumerate(MATCH_LENGTHS):
                followed = [row[s + 1] for s in range(q) if of_query[s] >= length]
                agree = followed.count(best)
                expected = [len(followed), followed.count(label[q]), agree]
                assert [int(each[q, level]) for each in found] == expected


@pytest.mark.slow  # the compiler for C++
def test_compiled_counts_are_equal_and_queries_without_positions_have_none() -> None:
    nothing = Matches(torch.full((2, 3, 64), -1, dtype=torch.int8), torch.zeros(2, 64, dtype=torch.int64))
    compiled, labels = torch.compile(counts_by_length, fullgraph=True), torch.zeros(2, 3, dtype=torch.int64)
    assert not any(each.any() for each in compiled(nothing, labels))
    tokens = few_tokens(2, 40)
    matches = context_matches(tokens, None, 4)
    for found, expected in zip(compiled(matches, tokens), counts_by_length(matches, tokens), strict=True):
        assert torch.equal(found, expected)


def test_counts_of_some_rows_at_a_time_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = few_tokens(5, 40)
    matches = context_matches(tokens, None, 4)
    monkeypatch.setattr(matching, "_BLOCK", 2 * 40 * 40)  # two rows, two, one
    torch.library.opcheck(torch.ops.retro.count_votes.default, (*matches, tokens))
    assert torch.equal(torch.ops.retro.count_votes(*matches, tokens), matching._counted(*matches, tokens))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "queries", "positions"), [(512, 32, 128), (4, 2048, 2048)])
def test_counts_that_a_gpu_compiles_are_equal(rows: int, queries: int, positions: int) -> None:
    """Once the columns were read before they were written: see `matches.py`."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(-1, LONGEST + 1, (rows, queries, positions), generator=random, dtype=torch.int8)
    following, labels = (torch.randint(0, 9, (rows, size), generator=random) for size in (positions, queries))

    def counted(lengths: torch.Tensor, following: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return counts_by_length(Matches(lengths + 0, following), labels)

    given = [x.cuda() for x in (lengths, following, labels)]
    for found, expected in zip(
        torch.compile(counted, fullgraph=True)(*given), counted(lengths, following, labels), strict=True
    ):
        assert torch.equal(found.cpu(), expected)


def heads() -> list[dict[str, Any]]:
    return [
        {"copy_head.context": own, "copy_head.neighbors": theirs}
        for own, theirs in ((True, False), (False, True), (True, True))
    ] + [
        {"copy_head.neighbors": False, "copy_head.datastore": True},
        {"copy_head.context": True, "copy_head.neighbors": True, "copy_head.datastore": True},
    ]


@pytest.mark.parametrize("settings", heads(), ids=str)
@pytest.mark.parametrize("retrieval", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_mixture_is_a_distribution_and_gives_the_labels_the_probabilities_of_the_loss(
    settings, retrieval, training
) -> None:
    model = build(**settings).train(training)
    tokens, neighbors, lengths = batch()
    inputs = (tokens % FEW, None, neighbors % FEW, lengths, None, votes(2 * FEW)) if retrieval else (tokens % FEW,)
    labels = tokens.roll(-1, 1) % (2 * FEW)  # some of them were never read
    with torch.no_grad():
        log_p = model(Inputs(*inputs)._replace(labels=labels)).log_softmax(-1)
        losses = model.token_losses(Inputs(*inputs)._replace(labels=labels))
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(B, T))
    torch.testing.assert_close(-log_p.gather(2, labels[..., None])[..., 0], losses)


@pytest.mark.parametrize("settings", heads(), ids=str)
def test_the_mixture_trains_the_copy_head_and_cross_entropy_the_vocabulary(settings) -> None:
    model = build(**settings).train()
    tokens, neighbors, lengths = batch()
    lengths[0] = 0
    inputs = tokens % FEW, torch.tensor([[0, 0, 1, 1]] * B), neighbors % FEW, lengths, None, votes(2 * FEW)
    labels = tokens.roll(-1, 1) % (2 * FEW)
    labels[1, 3:6] = IGNORED_LABEL
    hidden = model.hidden(Inputs(*inputs))[0]
    logits, nll = model.logits(hidden), partial(torch.nn.functional.nll_loss, ignore_index=IGNORED_LABEL)
    of_vocabulary = nll(logits.log_softmax(-1).flatten(0, 1), labels.flatten())
    of_mixture = nll(model.mix(logits.detach(), Inputs(*inputs)).flatten(0, 1), labels.flatten())
    ours = loss_of(model, labels, *inputs)
    torch.testing.assert_close(ours, of_mixture)
    names, parameters = zip(*model.named_parameters(), strict=True)
    plain = of_vocabulary + of_mixture
    wanted, found = (torch.autograd.grad(each, parameters, allow_unused=True) for each in (plain, ours))
    for name, a, b in zip(names, found, wanted, strict=True):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_change_the_loss_little(dtype: torch.dtype) -> None:
    model = build(**heads()[2])
    tokens, neighbors, lengths = batch()
    inputs = tokens % FEW, None, neighbors % FEW, lengths
    exact = loss_of(model, tokens, *inputs)
    with torch.autocast("cpu", dtype):
        narrow = loss_of(model, tokens, *inputs)
    narrow.backward()
    torch.testing.assert_close(narrow, exact, rtol=0.02, atol=0.02)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def test_a_probability_of_zero_has_a_finite_loss_and_gradient() -> None:
    head = CopyHead(("context",), M)
    head.initialize()
    tokens = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])
    evidence = head.evidence(head.sources(Inputs(tokens)), torch.full_like(tokens, 9))  # no position votes for it
    vocabulary = TokenLosses(torch.full((1, 8), 2e4), torch.zeros(1, 8), torch.full(evidence.best.shape, -2e4))
    value = head.losses(vocabulary, torch.full_like(tokens, 9), evidence)
    value.sum().backward()
    assert value.isfinite().all()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in head.parameters())


def test_a_new_copy_head_predicts_what_followed_a_long_match() -> None:
    run = torch.arange(40, 60)
    model = Retro(updated(SETTINGS, {**heads()[0], "vocab_size": 64}))
    tokens = torch.cat((run, few_tokens(9), run[:10]))[None]
    with torch.no_grad():
        p = model(Inputs(tokens))[0, -1].exp()
    assert p.argmax() == run[10]
    assert p[run[10]] > 0.2


def test_off_is_a_head_without_neighbors_to_the_bit() -> None:
    model = build(**heads()[2])
    tokens = batch()[0] % FEW
    alone = CopyHead(build(**heads()[0]).settings.copy_head.names, M)
    assert model.copy_head is not None
    alone.load_state_dict(model.copy_head.state_dict(), strict=False)
    with torch.no_grad():
        logits, sources = model.logits(model.hidden(Inputs(tokens))[0]), alone.sources(Inputs(tokens))
        assert torch.equal(model(Inputs(tokens)), alone.mix(logits, sources, alone.evidence(sources, tokens)))


def planted() -> tuple[Retro, Inputs, Tensor]:
    """A model, rows in which a neighbor and the votes of the datastore continue the text, and logits."""
    model = build(**heads()[2] | {"copy_head.datastore": True})
    tokens = (torch.arange(2 * M) + 1).expand(B, -1).contiguous()
    neighbors = (torch.arange(R) + 2).expand(B, 2, K, R).contiguous()
    of_votes = agreed_votes(torch.full_like(tokens, 2 * M + 1))
    of_votes[:, :-1] = 0
    whole = Inputs(tokens, None, neighbors, torch.full((B, 2, K), R), votes=of_votes, labels=tokens.roll(-1, 1))
    return model, whole, model.logits(model.hidden(whole)[0])


@pytest.mark.parametrize("switched", [False, True])
@torch.no_grad()
def test_copy_strength_is_between_the_mixture_and_retrieval_off_in_each_row(switched: bool) -> None:
    model, whole, logits = planted()
    head, sources = model.copy_head, model.copy_sources(whole)
    assert head is not None
    trust = model.scored(whole)[1] if switched else None
    evidence = head.evidence(sources, whole.labels)

    def mixed(*strengths: float) -> Tensor:
        return head.mix(logits, sources, evidence, trust=trust, copy_strength=torch.tensor(strengths)[:, None])

    full = head.mix(logits, sources, evidence, trust=trust)
    off = head.mix(logits, of_context := head.sources(whole.off()), head.evidence(of_context, whole.labels))
    assert torch.equal(mixed(1, 1), full)
    assert torch.equal(mixed(0, 0), off)
    assert torch.equal(mixed(0, 1), torch.stack((off[0], full[1])))
    assert torch.equal(mixed(0.5, 0.1), torch.stack((mixed(0.5, 0.5)[0], mixed(0.1, 0.1)[1])))
    copied = [float(mixed(strength, 0)[0, M, M + 2]) for strength in (0, 1e-3, 0.1, 0.5, 1)]
    assert copied == sorted(copied)
    assert copied[0] < copied[2] < copied[3] < copied[4]
    if not switched:  # 1 / share of the vocabulary = 1 + odds of the sources: nothing copies token 0
        log_inverse = {strength: -mixed(strength, strength)[..., 0] for strength in (0, 0.5, 1)}
        # Logarithms are compared: in float32 they are exact to 1e-6, so a probability of 1e-7 is exact to a few millionths of it.
        torch.testing.assert_close(log_inverse[0.5], ((log_inverse[0].exp() + log_inverse[1].exp()) / 2).log())


@torch.no_grad()
def test_a_network_can_copy_less_of_a_best_candidate_that_the_vocabulary_excludes() -> None:
    head = CopyHead(("datastore",), M)
    inputs = Inputs(torch.zeros(2, 1, dtype=torch.int64), votes=agreed_votes(torch.tensor([[2], [2]]), 5))
    sources = head.sources(inputs)
    evidence = head.evidence(sources, inputs.tokens)
    logits = torch.zeros(2, 1, 4)
    logits[:, 0, 3], logits[1, 0, 2] = 2.0, -20.0  # the likeliest token is another one
    assert (evidence.best[:, 0, head.index("datastore")] == 2).all()
    before = head.mix(logits, sources, evidence)[:, 0, 2]
    assert before[0] > before[1] > -1
    network = head.network(DATASTORE)
    assert network is not None
    network.inner_best[0, BEST_FEATURES * head.index("datastore") + 1] = 1.0  # its log-probability
    network.outer[:, 0] = 1.0
    after = head.mix(logits, sources, evidence)[:, 0, 2]
    assert after[1] < before[1] < before[0] < after[0]


@torch.no_grad()
def test_a_text_that_is_read_once_has_the_losses_of_each_way_alone() -> None:
    model, whole, _ = planted()
    assert model.copy_head is not None
    for parameter in model.copy_head.parameters():
        parameter.normal_(std=0.1)
    other = whole._replace(neighbors=whole.neighbors.flip(2), votes=agreed_votes(whole.labels))
    ways = [whole, whole.off(), other, whole._replace(votes=None)]
    model.settings = updated(model.settings, {"retrieval.cca_layers": ()})  # the activations are those of the first
    hidden, _ = model.hidden(whole)
    for read, inputs in zip(model.read(ways, hidden), ways, strict=True):
        torch.testing.assert_close(model.with_copying(read, inputs)[0], model.token_losses(inputs, hidden))


@torch.no_grad()
def test_the_share_that_was_copied_is_that_with_the_copy_strength() -> None:
    model, whole, logits = planted()
    head, sources = model.copy_head, model.copy_sources(whole)
    assert head is not None
    strength, evidence = torch.tensor([[0.1], [0.0]]), head.evidence(sources, whole.labels)
    log_p = head.mix(logits, sources, evidence, copy_strength=strength)
    losses, vocabulary = -log_p.gather(2, whole.labels[..., None])[..., 0], logits.log_softmax(-1)
    log_top, log_best = vocabulary.amax(-1), vocabulary.gather(2, evidence.best)
    origins = head.origins(log_top, log_best, whole.labels, losses, sources, R, copy_strength=strength)
    off = head.mix(logits, sources, evidence, copy_strength=torch.zeros(B, 1))
    assert 0 < origins.of(NEIGHBORS)[0, M] < 1
    assert not origins.of(NEIGHBORS)[1].any()
    assert not origins.of(DATASTORE)[1].any()
    assert off[0, M, M + 2] < log_p[0, M, M + 2]


def test_origins_name_the_neighbor_and_the_token_that_a_label_was_copied_from() -> None:
    model = build(**heads()[2])
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])  # chunks of 4 tokens
    neighbors = torch.tensor([[[9, 9, 9, 9, 9, 9, 9], [9, 3, 4, 5, 6, 9, 4]], [[9] * 7] * 2])[None]
    lengths = torch.tensor([[[7, 7], [7, 7]]])
    labels = tokens.roll(-1, 1)
    origins = origins_of(model, labels, tokens, None, neighbors, lengths)
    none = [-1] * 3
    assert origins.neighbors[0].tolist() == [*none, 1, 1, -1, -1, -1]  # 5 after 3 4, then 6 after 3 4 5
    assert origins.positions[0].tolist() == [*none, 3, 4, -1, -1, -1]
    assert origins.lengths[0].tolist() == [*none, 2, 3, -1, -1, -1]
    assert (origins.of(NEIGHBORS)[0] > 0).tolist() == [False] * 3 + [True] * 2 + [False] * 3


@pytest.mark.parametrize("settings", heads(), ids=str)
def test_origins_are_tokens_equal_to_the_labels_and_shares_of_their_probability(settings) -> None:
    model = build(**settings)
    tokens, neighbors, lengths = batch()
    tokens, neighbors = tokens % FEW, neighbors % FEW
    lengths[0, 1] = 0
    labels = tokens.roll(-1, 1)
    labels[1, 5] = IGNORED_LABEL
    origins = origins_of(model, labels, tokens, None, neighbors, lengths)
    copied = origins.positions >= 0
    assert copied.any() == settings["copy_head.neighbors"]
    assert ((origins.of(NEIGHBORS) >= 0) & (origins.of(NEIGHBORS) <= 1)).all()
    assert torch.equal(origins.of(NEIGHBORS) > 0, copied)
    for b, t in copied.nonzero().tolist():
        place = b, (t + 1) // M - 1, int(origins.neighbors[b, t])
        assert neighbors[*place, origins.positions[b, t]] == labels[b, t]
        assert origins.positions[b, t] < lengths[place]


def test_the_share_of_neighbors_is_what_the_mixture_loses_without_their_votes() -> None:
    model = build(**heads()[2])
    tokens, neighbors, lengths = batch()
    tokens, neighbors = tokens % FEW, neighbors % FEW
    labels = tokens.roll(-1, 1)
    origins = origins_of(model, labels, tokens, None, neighbors, lengths)
    assert model.copy_head is not None
    with torch.no_grad():
        whole = Inputs(tokens, None, neighbors, lengths, labels=labels)
        logits, (_, trust, _) = model.logits(model.hidden(whole)[0]), model.scored(whole)
        sources = model.copy_sources(whole)
        evidence = model.copy_head.evidence(sources, labels)
        p = model.copy_head.mix(logits, sources, evidence, trust=trust).exp()
        matches = sources["neighbors"].matches
        other = sources["neighbors"]._replace(matches=matches._replace(following=matches.following + V))
        wide = torch.cat((logits, torch.full_like(logits, -torch.inf)), 2)  # the neighbors vote for other tokens
        without = model.copy_head.mix(wide, sources | {"neighbors": other}, evidence, trust=trust).exp()
    p, without = (each.gather(2, labels[..., None])[..., 0] for each in (p, without))
    torch.testing.assert_close(origins.of(NEIGHBORS), 1 - without / p, atol=1e-5, rtol=1e-4)


def test_the_share_of_the_datastore_is_what_the_mixture_loses_without_its_votes() -> None:
    model = build(**heads()[2] | {"copy_head.datastore": True})
    tokens, neighbors, lengths = batch()
    tokens, neighbors = tokens % FEW, neighbors % FEW
    labels = tokens.roll(-1, 1)
    voted = labels.clone()
    voted[0, :3] = (labels[0, :3] + 1) % FEW  # for other tokens
    assert model.copy_head is not None
    with torch.no_grad():
        whole = Inputs(tokens, None, neighbors, lengths, labels=labels, votes=agreed_votes(voted, 5))
        logits = model.logits(model.hidden(whole)[0])
        sources, (losses, trust, vocabulary) = model.copy_sources(whole), model.scored(whole)
        origins = model.copy_head.origins(*vocabulary[1:], labels, losses, sources, neighbors.shape[3], trust)
        evidence = model.copy_head.evidence(sources, labels)
        p = model.copy_head.mix(logits, sources, evidence, trust=trust).exp().gather(2, labels[..., None])[..., 0]
        other = sources["datastore"]._replace(tokens=sources["datastore"].tokens * 0 + V)
        wide = torch.cat((logits, torch.full((*labels.shape, 1), -torch.inf)), 2)
        without = model.copy_head.mix(wide, sources | {"datastore": other}, evidence, trust=trust).exp()
        without = without.gather(2, labels[..., None])[..., 0]
    assert (origins.of(DATASTORE)[0, :3] == 0).all()
    assert (origins.of(DATASTORE)[:, 3:-1] > 0).all()
    torch.testing.assert_close(origins.of(DATASTORE), 1 - without / p, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def origins_of(model: Retro, labels: Tensor, *inputs: Tensor | None) -> Origins:
    whole = Inputs(*inputs, labels=labels)
    assert model.copy_head is not None
    sources, (losses, trust, vocabulary) = model.copy_sources(whole), model.scored(whole)
    return model.copy_head.origins(*vocabulary[1:], labels, losses, sources, whole.neighbors.shape[3], trust)
