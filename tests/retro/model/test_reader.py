"""The decoder as reader of neighbors equals plain loops, reads no later chunk's neighbors, and changes nothing OFF."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from indexing.store.errors import InputError
from retro.batch.inputs import Inputs
from retro.model.presets import baseline_of, resolve
from retro.model.retro import Retro
from retro.model_settings import ModelSettings, RetrievalSettings, updated
from retro.parallel.settings import check_reader, divided
from tests.retro.small_model import (
    DOCUMENTS,
    SCHEMES,
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
    embedding_gradients,
    few,
    first_difference,
    logits,
    loss_of,
)

READS = {"retrieval.reader": "decoder", "retrieval.cca_layers": ()}
LLAMA = {**READS, "attention.num_kv_heads": 1, "activation": "swiglu", "scaled_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA | {"attention.sliding_window": 3},
    "qwen2": LLAMA | {"attention.bias": "qkv"},
    "qwen3": LLAMA | {"attention.qk_norm": True},
    "neox": READS | SCHEMES["neox"],
}
every_family = pytest.mark.parametrize("family", FAMILIES)


# ----------------------------------------------------------------------------------------------------- plain loops


def rotated(x: Tensor, position: int, model: Retro) -> Tensor:
    """A head's features [C] at a position."""
    s, rotary = model.settings, model.settings.rotary_dim
    out = x.clone()
    for pair in range(rotary // 2):
        radians = s.rope.theta ** (-pair / (rotary // 2))
        if s.rope.scaling == "llama3":
            turns = s.rope.original_max_positions * radians / (2 * math.pi)
            part = (turns - s.rope.low_freq_factor) / (s.rope.high_freq_factor - s.rope.low_freq_factor)
            part = min(1.0, max(0.0, part))
            radians *= part + (1 - part) / s.rope.factor
        a, b = x[pair], x[pair + rotary // 2]
        cos, sin = math.cos(position * radians), math.sin(position * radians)
        out[pair], out[pair + rotary // 2] = a * cos - b * sin, b * cos + a * sin
    return out


Token = tuple[Any, ...]
"""("text", t) or ("neighbor", u, k, j)."""


def loops(model: Retro, tokens: list[int], neighbors: Tensor, lengths: Tensor, documents: list[int]) -> Tensor:
    """Logits [T, V] of one row. Each token has a list of tokens that it sees, with their positions."""
    s, num_tokens = model.settings, len(tokens)
    window = s.attention.sliding_window or num_tokens + R
    ids: dict[Token, int] = {("text", t): token for t, token in enumerate(tokens)}
    sees: dict[Token, list[tuple[Token, int]]] = {}  # with the distance
    for u, k, j in [(u, k, j) for u in range(len(neighbors)) for k in range(neighbors.shape[1]) for j in range(R)]:
        ids["neighbor", u, k, j] = int(neighbors[u, k, j])
        sees["neighbor", u, k, j] = [(("neighbor", u, k, i), j - i) for i in range(j + 1) if j - i < window]
    document = [documents[t // M] for t in range(num_tokens)]
    for t in range(num_tokens):
        seen = [(("text", i), t - i) for i in range(t + 1) if document[i] == document[t] and t - i < window]
        u, own = (t + 1) // M - 1, t - document.index(document[t])  # position in the document
        continues = (u + 1) * M >= num_tokens or document[u * M] == document[(u + 1) * M]
        if u >= 0 and continues:
            for k in range(neighbors.shape[1]):  # all but the first token, right before the document
                seen += [(("neighbor", u, k, j), own - (j - R)) for j in range(1, int(lengths[u, k]))]
        sees["text", t] = seen
    h = {name: model.scaled(model.embedding.weight[token]) for name, token in ids.items()}
    for layer in model.layers:
        block, h_before = layer.attention.block, h
        x = {name: layer.attention.norm(vector) for name, vector in h.items()}
        q = {name: block.project_queries(vector[None, None])[0, 0] for name, vector in x.items()}
        kv = {
            name: [part[0, 0] for part in block.project_keys_values(vector[None, None])] for name, vector in x.items()
        }
        h = {
            name: h[name] + attended(model, block, q[name], [(*kv[seen], apart) for seen, apart in sees[name]])
            for name in h
        }
        reads = h_before if s.parallel_residual else h
        feed = layer.feed_forward
        h = {name: h[name] + feed.block(feed.norm(reads[name])) for name in h}
    return torch.stack([F.linear(model.finish(h["text", t]), model.output_weight) for t in range(num_tokens)])


def attended(model: Retro, block: Any, q: Tensor, seen: list[tuple[Tensor, Tensor, int]]) -> Tensor:
    heads, groups = q.shape[0], seen[0][0].shape[0]
    out = []
    for head in range(heads):
        group = head * groups // heads
        query = q[head] * block.head_dim**-0.5
        scores = torch.stack([rotated(query, apart, model) @ k[group] for k, _, apart in seen])
        out.append(sum(w * v[group] for w, (_, v, _) in zip(scores.softmax(0), seen, strict=True)))
    return block.o_proj(torch.cat(out))


@every_family
@pytest.mark.parametrize("documents", [None, [3, 3, 4, 4]])
@torch.no_grad()
def test_logits_equal_plain_loops(family: str, documents: list[int] | None) -> None:
    model = build(**FAMILIES[family])
    tokens, neighbors, lengths = batch()
    lengths[0, 1, 1], lengths[0, 2] = 0, torch.tensor([1, R])
    for num_tokens in (T, 2 * M + 1) if documents else (T - 1,):
        chunks = num_tokens // M
        named = None if documents is None else torch.tensor([documents])[:, : -(-num_tokens // M)]
        got = model(Inputs(tokens[:1, :num_tokens], named, neighbors[:1, :chunks], lengths[:1, :chunks]))[0]
        row = tokens[0, :num_tokens].tolist()
        expected = loops(model, row, neighbors[0, :chunks], lengths[0, :chunks], documents or [0] * U)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


# --------------------------------------------------------------------------------------------------------- leaks, OFF


@every_family
def test_without_neighbors_the_model_is_its_base_to_the_bit(family: str) -> None:
    model, base = build(**FAMILIES[family]), build(**FAMILIES[family] | {"retrieval.reader": ""})
    assert model.state_dict().keys() == base.state_dict().keys()  # no new parameters
    tokens, neighbors, lengths = batch()
    for documents in (None, DOCUMENTS):
        off = logits(base, tokens, documents)
        assert torch.equal(logits(model, tokens, documents), off)
        assert torch.equal(logits(model, tokens, documents, neighbors[:, :, :0], lengths[:, :, :0]), off)
        assert not torch.allclose(logits(model, tokens, documents, neighbors, lengths), off)
    losses = [loss_of(either, tokens, tokens) for either in (model, base)]
    assert torch.equal(*losses)


@every_family
@given(
    chunk=st.integers(0, U - 1), row=st.integers(0, B - 1), neighbor=st.integers(0, K - 1), token=st.integers(1, R - 1)
)
@few
def test_one_token_of_a_neighbor_affects_its_window_and_later_tokens_only(
    family: str, chunk: int, row: int, neighbor: int, token: int
) -> None:
    model, (tokens, neighbors, _) = MODELS[family], batch(chunk)
    changed = neighbors.clone()
    changed[row, chunk, neighbor, token] = (changed[row, chunk, neighbor, token] + 1) % V
    before, after = (logits(model, tokens, None, either) for either in (neighbors, changed))
    assert first_difference(before, after) == (chunk + 1) * M - 1
    assert torch.equal(before[1 - row], after[1 - row])


MODELS = {family: build(**changes) for family, changes in FAMILIES.items()}


@every_family
def test_gradients_reach_neighbors_of_finished_chunks_and_no_others(family: str) -> None:
    model = build(**FAMILIES[family], tied_embeddings=False)
    tokens = torch.zeros(1, T, dtype=torch.int64)
    neighbors = (1 + torch.arange(U)[:, None, None] * K + torch.arange(K)[:, None]).expand(1, U, K, R)
    output = model(Inputs(tokens, None, neighbors)).square().sum(-1)[0]
    for position in range(T):
        gradients = embedding_gradients(model, output[position], model.embedding.weight)
        readable = (position + 1) // M * K  # neighbors of chunks whose last token is at or before this position
        if not model.settings.attention.sliding_window:  # with a window of 3, older ones may be out of reach
            assert (gradients[1 : 1 + readable] > 0).all()
        assert (gradients[1 + readable :] == 0).all()


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3"])  # its norms are float32
def test_gradients_equal_differences(family: str) -> None:
    """Training merges two attentions by their sums: the derivative goes through both."""
    model = build(**FAMILIES[family]).double()
    tokens, neighbors, lengths = batch()

    def loss() -> Tensor:
        return model(Inputs(tokens, DOCUMENTS, neighbors, lengths)).square().mean()

    loss().backward()
    for name in (
        "attention.1.block.k_proj.weight",
        "attention.2.block.v_proj.weight",
        "attention.0.block.q_proj.weight",
    ):
        weight = dict(model.named_parameters())[name]
        direction = torch.randn_like(weight)
        with torch.no_grad():
            weight.add_(direction, alpha=1e-5)
            above = loss()
            weight.add_(direction, alpha=-2e-5)
            difference = (above - loss()) / 2e-5
            weight.add_(direction, alpha=1e-5)
        torch.testing.assert_close((weight.grad * direction).sum(), difference, rtol=1e-4, atol=1e-6)


def test_gradients_of_keys_do_not_depend_on_which_weights_are_frozen() -> None:
    """Queries of the first layer have no gradient if only its keys are trained."""
    tokens, neighbors, lengths = batch()
    found = []
    for frozen in (False, True):
        model = build(**LLAMA)
        key = model.attention["0"].block.k_proj.weight
        if frozen:
            model.requires_grad_(False)
            key.requires_grad_(True)
        model(Inputs(tokens, None, neighbors, lengths)).square().mean().backward()
        found.append(key.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-7)


def test_the_copy_head_reads_the_same_neighbors() -> None:
    model = build(**LLAMA, **SCHEMES["copying"])
    tokens, neighbors, lengths = batch()
    on = model(Inputs(tokens, DOCUMENTS, neighbors, lengths))
    torch.testing.assert_close(on.logsumexp(-1), torch.zeros(B, T), atol=1e-5, rtol=0)
    loss_of(model, tokens, tokens, DOCUMENTS, neighbors, lengths).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("k", [1, 2, 4])
def test_any_number_of_neighbors_can_be_read(k: int) -> None:
    """Copies of a neighbor are read k times: one softmax gives them more weight, but the values stay the same."""
    tokens, neighbors, lengths = batch()
    copies, same = neighbors[:, :, :1].expand(-1, -1, k, -1), lengths[:, :, :1].expand(-1, -1, k)
    on = logits(MODELS["llama"], tokens, None, copies, same)
    once = logits(MODELS["llama"], tokens, None, copies[:, :, :1], same[:, :, :1])
    assert torch.allclose(on, once, rtol=1e-4, atol=1e-4) == (k == 1)
    padded = torch.cat((copies, neighbors[:, :, 1:]), 2), F.pad(same, (0, 1))
    torch.testing.assert_close(logits(MODELS["llama"], tokens, None, *padded), on, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention.positions": "learned"}, r"model\.attention\.positions = 'learned': should be 'rope' with model"),
        ({"attention.positions": "alibi"}, r"model\.attention\.positions = 'alibi': should be 'rope' with model"),
        (
            {"attention.positions": "transformer-xl"},
            r"model\.attention\.positions = 'transformer-xl': should be 'rope'",
        ),
        ({"attention.smeared_tokens": 3}, r"model\.attention\.smeared_tokens = 3: should be 0 with model"),
        ({"experts.num_experts": 4}, r"model\.experts\.num_experts = 4: should be 0 with model\.retrieval\.reader"),
        ({"retrieval.cca_layers": (2,)}, r"model\.retrieval\.cca_layers = \(2,\): should be an empty list with model"),
    ],
)
def test_decoders_that_cannot_read_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        updated(SETTINGS, READS | changes)


def test_what_divides_the_stream_is_refused_by_name() -> None:
    model = build(**READS)
    with pytest.raises(InputError, match=r"parallel\.tensor = 2: must be 1 with model\.retrieval\.reader = 'decoder'"):
        divided(model.settings, 2)
    with pytest.raises(InputError, match=r"parallel\.pipeline = 2: must be 1 with model\.retrieval\.reader"):
        check_reader(model.settings, pipeline=2)


def test_presets_and_bases_have_one_reader() -> None:
    reads = RetrievalSettings(reader="decoder")
    for settings in (ModelSettings(retrieval=reads), ModelSettings(preset="tiny", retrieval=reads)):
        resolved = resolve(settings)
        assert (resolved.retrieval.cca_layers, resolved.copy_head.neighbors) == ((), True)
        assert (resolved.retrieves, baseline_of(settings).retrieves) == (True, False)
    base = resolve(updated(SETTINGS, {"retrieval.cca_layers": ()}))
    added = resolve(ModelSettings(preset="base", chunk_length=M, retrieval=reads), base)
    assert added == replace(base, retrieval=replace(base.retrieval, reader="decoder"), encoder=added.encoder)
    assert resolve(ModelSettings(preset="base", chunk_length=M), added).decoder_reads  # further training keeps it
