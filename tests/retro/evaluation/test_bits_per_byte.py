"""Bits per byte equals a slow computation over exactly the bytes of the text."""

import contextlib
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from indexing.progress import STATUS
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.tokenization.metadata import read_meta
from indexing.tokenization.settings import TokenizerSettings
from retro.batch.inputs import Inputs
from retro.data.neighbor_choice import NeighborUse
from retro.data.windows import document_windows
from retro.device import choose_placement
from retro.evaluation import bits_per_byte as evaluation
from retro.evaluation.bits_per_byte import SetResult, compare, interval, joined
from retro.evaluation.evaluator import Evaluator
from retro.evaluation.sets import EvaluationSet
from retro.evaluation.settings import EvaluationSettings
from retro.model.datastore_fit import fit_to
from retro.model.retro import Retro
from tests.conftest import build_local, tiny_config
from tests.indexing.corpus.reading import to_tokens
from tests.indexing.tokenization.models import foreign_model

FLOAT32 = choose_placement("cpu", "float32")


def evaluator_of(model: Retro, **settings) -> Evaluator:
    return Evaluator(model, FLOAT32, EvaluationSettings(**{"window": 64, **settings}))


def measure(model: Retro, datastore: Datastore, k: int = 0, **settings) -> SetResult:
    return evaluator_of(model, **settings).score(EvaluationSet("valid", datastore), NeighborUse(k))


@pytest.mark.parametrize("k", [0, 2])
def test_bits_per_byte_equals_a_forward_pass_over_each_document(
    tiny_model: Retro, tiny_datastore: Datastore, k: int
) -> None:
    valid, train = tiny_datastore.valid, tiny_datastore.train
    longest = max(valid.chunk_range(n)[1] - valid.chunk_range(n)[0] for n in range(valid.num_documents))
    nats = 0.0
    for number in range(valid.num_documents):
        first, stop = valid.chunk_range(number)
        tokens = torch.from_numpy(valid.tokens.read(first, stop).astype(np.int64)).reshape(1, -1)
        length = len(to_tokens(valid.tokens.read(first, stop), valid.lengths.read(first, stop)))
        retrieved = {}
        if k:
            found, lengths = train.with_continuation(valid.neighbor_ids.read(first, stop)[:, :k].ravel())
            retrieved["neighbors"] = torch.from_numpy(found).reshape(1, stop - first, k, -1)
            retrieved["neighbor_lengths"] = torch.from_numpy(lengths).reshape(1, stop - first, k)
        with torch.no_grad():
            logs = tiny_model.eval()(Inputs(tokens, **retrieved)).log_softmax(-1)
        nats -= logs[0, torch.arange(length - 1), tokens[0, 1:length]].double().sum().item()
    text_bytes = sum(row["bytes"] for row in valid.metadata(range(valid.num_documents)))
    result = measure(tiny_model, tiny_datastore, k=k, window=16 * longest)
    assert result.bytes == text_bytes
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(nats / result.tokens), rel=1e-5)


def test_a_space_prepended_by_the_tokenizer_is_not_counted(tmp_path: Path, tiny_corpus: Path) -> None:
    """Llama 2's tokenizer prepends a space."""
    options = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    path = foreign_model(tmp_path / "their.model", vocab_size=600, **options)
    tokenizer = TokenizerSettings(kind="sentencepiece", path=str(path))
    datastore = build_local(replace(tiny_config(tmp_path, tiny_corpus), tokenizer=tokenizer))
    settings = fit_to(tiny_config(tmp_path, tiny_corpus).model, datastore.manifest, datastore.folder)
    valid = datastore.valid
    text_bytes = sum(row["bytes"] for row in valid.metadata(range(valid.num_documents)))
    for stride in (16, 32):
        result = measure(Retro(settings), datastore, stride=stride)
        assert result.bytes == text_bytes
    assert read_meta(datastore.folder / "tokenizer").added_bytes == 1


def test_stride_and_batch_size_do_not_change_the_scored_tokens(tiny_model: Retro, tiny_datastore: Datastore) -> None:
    results = [
        measure(tiny_model, tiny_datastore, stride=stride, batch_size=size)
        for stride, size in ((16, 3), (32, 8), (48, 5))
    ]
    assert len({result.tokens for result in results}) == 1
    assert len({result.bytes for result in results}) == 1


def test_results_off_are_reproducible_and_differ_from_on(tiny_model: Retro, tiny_datastore: Datastore) -> None:
    assert measure(tiny_model, tiny_datastore).bits_per_byte != measure(tiny_model, tiny_datastore, k=2).bits_per_byte
    assert measure(tiny_model, tiny_datastore).bits_per_byte == measure(tiny_model, tiny_datastore).bits_per_byte


def test_max_tokens_limits_the_evaluation_and_the_training_mode_is_restored(
    tiny_model: Retro, tiny_datastore: Datastore
) -> None:
    tiny_model.train()
    result = measure(tiny_model, tiny_datastore, max_tokens=200)
    assert 100 <= result.tokens <= 400
    assert tiny_model.training


@pytest.mark.parametrize("k", [0, 2])
def test_a_batch_is_counted_layer_by_layer_and_scored_alike(
    tiny_model: Retro, tiny_datastore: Datastore, k: int
) -> None:
    held_out, use, counted = EvaluationSet("valid", tiny_datastore), NeighborUse(k), list[int]()
    evaluator = evaluator_of(tiny_model, batch_size=10_000)
    shown = replace(evaluator, progress=lambda *_, **__: contextlib.nullcontext(counted.append))
    result = shown.score(held_out, use)
    assert sum(counted) == result.tokens
    assert len(counted) == tiny_model.settings.num_layers + 1
    assert min(counted) > 0
    plain = replace(evaluator, token_losses_of=losses_of(tiny_model)).score(held_out, use)
    assert np.array_equal(plain.nats_by_document, result.nats_by_document)


def test_measurements_of_single_windows_are_joined_to_that_of_all(tiny_model: Retro, tiny_datastore: Datastore) -> None:
    held_out, split = EvaluationSet("valid", tiny_datastore), tiny_datastore.valid
    windows = list(document_windows(split, 4, 2))[:6]
    evaluator = evaluator_of(tiny_model, batch_size=1)
    whole, *parts = (
        evaluator.score(held_out, NeighborUse(2), windows=some)
        for some in (windows, *([window] for window in reversed(windows)))
    )
    found = joined(parts)
    assert (found.tokens, found.documents, found.mode) == (whole.tokens, whole.documents, whole.mode)
    np.testing.assert_allclose(found.nats_by_document, whole.nats_by_document, rtol=1e-12)
    assert np.array_equal(found.token_scores.chunks, whole.token_scores.chunks)
    assert np.array_equal(found.token_scores.nats, whole.token_scores.nats, equal_nan=True)


def test_all_tokens_as_a_part_and_two_halves_give_the_whole(tiny_model: Retro, tiny_datastore: Datastore) -> None:
    result = measure(tiny_model, tiny_datastore, k=2)
    scored = result.token_scores.scored
    whole = result.part(scored)
    assert whole is not None
    assert (whole.tokens, whole.documents, whole.mode) == (result.tokens, result.documents, result.mode)
    np.testing.assert_array_equal(whole.bytes_by_document, result.bytes_by_document)
    np.testing.assert_allclose(whole.nats_by_document, result.nats_by_document, rtol=1e-12)
    half = np.random.default_rng(0).random(scored.shape) < 0.5
    parts = [part for part in (result.part(half), result.part(~half)) if part]
    assert sum(part.tokens for part in parts) == result.tokens
    assert sum(part.bytes for part in parts) == result.bytes
    assert result.part(~scored) is None


def test_an_evaluation_of_a_run_shows_its_percentage(
    tiny_model: Retro, tiny_datastore: Datastore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(STATUS, "retro")
    evaluator = replace(evaluator_of(tiny_model, batch_size=1, max_tokens=500), token_losses_of=losses_of(tiny_model))
    for use in (NeighborUse(0), NeighborUse(2)):
        evaluator.score(EvaluationSet("valid", tiny_datastore), use)
    for mode in ("OFF", "ON k=2"):
        shown = [int(percent) for percent in re.findall(rf"eval valid {mode}: (\d+)%", caplog.text)]
        assert len(shown) > 5
        assert shown == sorted(shown)
        assert (0 < shown[0] < 50, shown[-1]) == (True, 100)


def losses_of(model: Retro) -> Callable[[Inputs], Tensor]:
    """Losses of batches without gradients, as a run computes them."""
    return torch.inference_mode()(model.token_losses)


def test_comparing_a_result_with_itself_gives_zero(tiny_model: Retro, tiny_datastore: Datastore) -> None:
    result = measure(tiny_model, tiny_datastore)
    assert compare(result, result) == (0, 0, 0)
    worse = replace(result, nats_by_document=result.nats_by_document * 1.1)
    change, low, high = compare(worse, result)
    assert change == pytest.approx(10)
    assert low <= change + 1e-9
    assert high >= change - 1e-9


def test_an_interval_contains_the_figure_and_a_single_document_has_none() -> None:
    sizes = np.array([100.0, 0.0, 300.0])
    result = SetResult("valid", 0, 100, 1.0, np.array([90.0, 0.0, 400.0]), sizes)
    low, high = interval(result)
    by_document = [90 / 100 / math.log(2), 400 / 300 / math.log(2)]
    assert by_document == pytest.approx([low, high])
    assert low < result.bits_per_byte < high
    one = replace(result, bytes_by_document=sizes * [1, 0, 0], nats_by_document=np.array([90.0, 0, 0]))
    assert (result.documents, one.documents) == (2, 1)
    assert interval(one) is None


def test_bootstrapping_in_blocks_gives_the_same_interval(
    tiny_model: Retro, tiny_datastore: Datastore, monkeypatch
) -> None:
    off, on = measure(tiny_model, tiny_datastore), measure(tiny_model, tiny_datastore, k=2)
    whole = compare(on, off)
    monkeypatch.setattr(evaluation, "_BUFFERED_DRAWS", 1)
    change, low, high = compare(on, off)
    assert change == whole[0]
    assert (low, high) == pytest.approx(whole[1:], rel=0.2)


@pytest.mark.parametrize("change", [{"window": 50}, {"window": 32, "stride": 32}, {"stride": 10}])
def test_a_window_that_splits_chunks_is_rejected(tiny_model: Retro, tiny_datastore: Datastore, change) -> None:
    with pytest.raises(InputError, match=r"evaluation\.window"):
        measure(tiny_model, tiny_datastore, **change)
