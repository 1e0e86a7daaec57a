"""A checkpoint with its datastore scores and generates text, with retrieval ON and OFF."""

from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from retro.checkpoints.checkpoint import open_checkpoint
from retro.inference.language_model import LanguageModel, _check_fits
from retro.inference.settings import GenerationSettings
from retro.model.retro import Retro
from retro.model_settings import CopyHeadSettings, RetrievalSettings
from retro.training.trainer import train
from tests.conftest import tiny_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, tiny_datastore: Datastore) -> Path:
    """A checkpoint after a few steps on `tiny_datastore`."""
    config = tiny_config(tmp_path_factory.mktemp("run"), tiny_corpus)
    settings = replace(config.train, steps=4, eval_every=0, precision="float32")
    return train(config.run, replace(config, datastore=tiny_datastore.folder, train=settings).run_settings).checkpoint


@pytest.fixture(scope="module")
def language_model(checkpoint: Path) -> LanguageModel:
    return LanguageModel.open(checkpoint, device="cpu")


@pytest.fixture(scope="module")
def texts(language_model: LanguageModel, tiny_datastore: Datastore) -> list[np.ndarray]:
    """A document of several windows and a short text."""
    tokenizer, document = language_model.tokenizer, tiny_datastore.valid.tokens.read(0, 7).ravel()
    return [document, np.append(tokenizer.bos_id, tokenizer.encode("the index of the model"))]


def test_a_language_model_opens_with_its_own_another_or_no_datastore(
    checkpoint: Path, language_model: LanguageModel, tiny_datastore: Datastore, texts: list[np.ndarray]
) -> None:
    retriever = Retriever.open(tiny_datastore.folder)
    opened = [LanguageModel.open(checkpoint, source, "cpu") for source in (tiny_datastore.folder, retriever)]
    assert opened[1].retriever is retriever
    without = LanguageModel.open(checkpoint, retriever, "cpu", retrieval=False)
    assert without.retriever is None
    for k, others in ((0, [*opened, without]), (2, opened)):
        expected = language_model.score(texts, k)
        for other in others:
            assert [each.tolist() for each in other.score(texts, k)] == [each.tolist() for each in expected]
    with pytest.raises(InputError, match="without retrieval"):
        without.score(texts, 2)
    longer: Any = SimpleNamespace(datastore=SimpleNamespace(chunk_length=32))
    folder = retriever.datastore.folder
    with pytest.raises(InputError, match=rf"model\.chunk_length = 16, but {folder} has chunk_length = 32"):
        _check_fits(open_checkpoint(checkpoint), language_model.tokenizer, longer, folder)


def test_scores_are_log_probabilities_affected_by_retrieval_after_the_first_chunk(
    language_model: LanguageModel, texts: list[np.ndarray]
) -> None:
    m = language_model.model.settings.chunk_length
    assert len(texts[0]) > language_model.context
    for tokens, off, on in zip(texts, language_model.score(texts), language_model.score(texts, 2), strict=True):
        assert off.dtype == np.float64
        assert off.shape == on.shape == (len(tokens) - 1,)
        assert (off < 0).all()
        assert off[: m - 1] == pytest.approx(on[: m - 1], abs=1e-5)
    (likeliest,) = language_model.score_with_likeliest(texts[:1], 2, top=5)
    assert likeliest.likeliest.shape == likeliest.likeliest_log_probabilities.shape == (len(texts[0]) - 1, 5)


def test_scores_of_generated_tokens_equal_their_log_probabilities(
    language_model: LanguageModel, texts: list[np.ndarray]
) -> None:
    prompts = [texts[0][:20], texts[1]]
    for k in (0, 2):
        tokens, log_p = [list(prompt) for prompt in prompts], [[], []]
        for step in language_model.generate(prompts, GenerationSettings(max_tokens=30, seed=1), k):
            for piece in step:
                tokens[piece.row].append(piece.token)
                log_p[piece.row].append(piece.log_probability)
        scores = language_model.score([np.array(row) for row in tokens], k)
        for prompt, drawn, scored in zip(prompts, log_p, scores, strict=True):
            assert drawn == pytest.approx(scored[len(prompt) - 1 :].tolist(), abs=1e-3)


def test_without_bos_a_text_ends_with_the_token_that_begins_the_next_document(
    language_model: LanguageModel, texts: list[np.ndarray]
) -> None:
    settings = GenerationSettings(max_tokens=20, seed=3)
    free = [step[0].token for step in language_model.generate([texts[1]], settings, 0)]
    tokenizer = copy(language_model.tokenizer)  # a generated token begins documents: as BOS, then as <|endoftext|>
    tokenizer.bos_id = free[6]
    for control, number in (({}, 20), ({"<|endoftext|>": free[6]}, free.index(free[6]) + 1)):
        tokenizer.control_tokens = control
        steps = replace(language_model, tokenizer=tokenizer).generate([texts[1]], settings, 0)
        assert [step[0].token for step in steps] == free[:number]


def test_generated_text_equals_the_decoded_tokens(language_model: LanguageModel, texts: list[np.ndarray]) -> None:
    pieces = [step[0] for step in language_model.generate([texts[1]], GenerationSettings(max_tokens=60, seed=3), 2)]
    new = [piece.token for piece in pieces]
    whole = language_model.tokenizer.decode([*texts[1], *new])
    assert language_model.tokenizer.decode(texts[1]) + "".join(piece.text for piece in pieces) == whole


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "at least one token"),
        ([[1, 2]], "shape"),
        ([1, -1], "token id -1"),
        ([1, 10**6], "token id 1000000"),
        ([0.5], "must be integers"),
    ],
)
def test_invalid_token_rows_are_rejected_immediately(language_model: LanguageModel, tokens: list, words: str) -> None:
    for call in (language_model.score, lambda rows: language_model.generate(rows, GenerationSettings())):
        with pytest.raises(InputError, match=words):
            call([np.array([1, 2]), np.array(tokens)])
    with pytest.raises(InputError, match="k = -1"):
        language_model.score([np.array([1])], -1)


def test_off_and_on_together_are_the_scores_of_both_and_the_text_is_read_once(
    tmp_path: Path, tiny_corpus: Path, voting_datastore: Datastore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, tiny_corpus, datastore=voting_datastore.folder)
    model = replace(
        config.model, retrieval=RetrievalSettings(cca_layers=()), copy_head=CopyHeadSettings(True, True, True)
    )
    train(config.run, replace(config, model=model, train=replace(config.train, steps=1, eval_every=0)).run_settings)
    opened = LanguageModel.open(config.run, device="cpu")
    valid = voting_datastore.valid
    texts = [valid.tokens.read(*valid.chunk_range(number)).ravel().astype(np.int64)[:150] for number in range(4)]
    expected = [opened.score(texts, k) for k in (0, 2)]
    read, hidden = list[int](), Retro.hidden
    monkeypatch.setattr(Retro, "hidden", lambda *arguments: read.append(1) or hidden(*arguments))
    together = opened.score_off_and_on(texts, 2)
    once = len(read)
    opened.score(texts, 2)
    assert len(read) == 2 * once
    for ours, theirs in zip(together, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
    assert any((off != on).any() for off, on in zip(*together, strict=True))
