"""Compiled loops compute what the operations of torch do, and take a token alone as they take it among others."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from retro.copying.rows import Row
from retro.inference import few_tokens
from retro.inference.decoder import Decoder
from retro.inference.few_tokens import AttentionOfFew
from retro.inference.packed_kernels import FEW_ROWS
from retro.inference.packed_weights import pack
from retro.model.retro import Retro
from tests.retro.inference.test_decoder import retriever
from tests.retro.inference.test_packed_weights import FLOAT32, needs_fbgemm
from tests.retro.small_model import M, V, build

pytestmark = needs_fbgemm
PLAIN: dict[str, Any] = {"retrieval.cca_layers": ()}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "rope": ("rope", PLAIN),
    "llama": ("rope", {**PLAIN, "attention.num_kv_heads": 1, "activation": "swiglu"}),
    "neox": ("neox", PLAIN),
    "qwen": ("rope", {**PLAIN, "attention.qk_norm": True, "attention.bias": "qkv", "attention.sliding_window": 6}),
    "learned": ("learned", PLAIN),
    "cross-attention": ("rope", {}),
    "reading": ("reading", {}),
    "smeared": ("smeared", PLAIN),
    "prefix": ("prefix", PLAIN),
    "alibi": ("alibi", PLAIN),
    "transformer-xl": ("transformer-xl", PLAIN),
}

WITH_LOOPS = ("rope", "llama", "neox", "qwen", "learned")


def packed(name: str) -> Retro:
    scheme, changes = MODELS[name]
    model = build(scheme, **changes)
    pack(model, FLOAT32)
    return model


def logits(model: Retro) -> Iterator[Tensor]:
    """Of texts of several lengths that grow by a token in each step, while some leave and one joins."""
    rng = np.random.default_rng(0)
    decoder = Decoder(model, FLOAT32, 8 * M)
    rows = [decoder.add(rng.integers(0, V, length), retriever(2)) for length in (1, 3, 2 * M, 5 * M, 7 * M)]
    for step in range(3 * M):
        if step in (M, 2 * M):
            decoder.remove(rows.pop(step // M))
        if step == M:
            rows.append(decoder.add(rng.integers(0, V, 2), retriever(2)))
        yield decoder.read(rows)
        for row in rows:
            decoder.append(row, int(rng.integers(V)))


@pytest.mark.parametrize("name", MODELS)
def test_loops_compute_what_torch_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed(name)
    found = list(logits(model))
    monkeypatch.setattr(few_tokens, "_is_few", lambda _: False)
    for one, other in zip(found, logits(model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", WITH_LOOPS)
def test_a_token_has_the_same_bits_alone_and_in_a_draft(name: str) -> None:
    model, text = packed(name), np.random.default_rng(0).integers(0, V, M + FEW_ROWS)

    def after_prompt() -> tuple[Decoder, Row]:
        decoder = Decoder(model, FLOAT32, 8 * M)
        row = decoder.add(text[:M])
        decoder.read([row])
        decoder.append(row, int(text[M]))
        return decoder, row

    decoder, row = after_prompt()
    _, drafted = decoder.step(lambda *_: text[M + 1 :])
    decoder, row = after_prompt()
    for number, token in enumerate(text[M + 1 :]):
        assert torch.equal(decoder.read([row])[0], drafted[number])
        decoder.append(row, int(token))
    assert len(drafted) == FEW_ROWS


@pytest.mark.parametrize("name", MODELS)
def test_attention_with_other_parts_runs_as_in_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, runs = packed(name), list[int]()
    attended = AttentionOfFew._attended
    monkeypatch.setattr(AttentionOfFew, "_attended", lambda *given: [runs.append(1), attended(*given)][1])
    decoder = Decoder(model, FLOAT32, 8 * M)
    decoder.read([decoder.add(np.ones(3, np.int64))])
    assert len(runs) == len(model.layers) * (name in (*WITH_LOOPS, "cross-attention", "reading"))
