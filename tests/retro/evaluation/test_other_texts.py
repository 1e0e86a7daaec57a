"""Texts that are not in the datastore: which documents are drawn, and how they are scored."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexing.corpus.documents import CorpusSettings
from indexing.corpus.scan import list_files
from indexing.store.errors import InputError
from retro.evaluation import other_texts
from retro.evaluation.other_texts import SampledText, evaluate_texts, num_bytes, sample_texts, text_files
from retro.evaluation.settings import PerplexitySettings
from retro.inference.language_model import LanguageModel
from tests.conftest import write_corpus
from tests.indexing.corpus.test_megatron import write_megatron


@pytest.fixture(scope="module")
def model(tiny_run: Path) -> LanguageModel:
    return LanguageModel.open(tiny_run, device="cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("other") / "other.jsonl", 40, seed=5)


def drawn(model: LanguageModel, path: Path, **settings: Any) -> list[SampledText]:
    files = list_files(CorpusSettings(paths=(str(path),)))
    return sample_texts(str(path), files, model, PerplexitySettings(**settings), lambda units: None)


def test_rows_are_the_scores_of_the_language_model(model: LanguageModel, corpus: Path) -> None:
    settings = PerplexitySettings(k=(1, 2), texts=(str(corpus),), text_windows="beginning")
    (row,) = evaluate_texts(model, text_files(settings), settings)
    documents = [json.loads(line) for line in corpus.read_text().splitlines()]
    encoded = [model.tokenizer.encode(document["text"]) for document in documents]
    tokens = [np.append(model.tokenizer.bos_id, each)[: model.context] for each in encoded]
    off, on = ([-float(scores.sum()) for scores in model.score(tokens, k)] for k in (0, 2))
    sizes = [len(model.tokenizer.decode(each).encode()) for each in tokens]
    assert (row["set"], row["path"]) == (corpus.name, str(corpus))
    for measured, nats, k in zip(row["results"], (off, on), (0, 2), strict=True):
        assert measured["bits_per_byte"] == pytest.approx(sum(nats) / math.log(2) / sum(sizes), rel=1e-5)
        assert (measured["k"], measured["documents"], measured["tokens"]) == (k, 40, sum(map(len, tokens)) - 40)
    (change,) = row["changes"]
    assert change["percent"] == pytest.approx(100 * (sum(on) / sum(off) - 1), abs=1e-3)
    assert change["low"] < change["percent"] < change["high"]
    worst = max(range(40), key=lambda number: on[number] / off[number])
    assert row["worst"]["id"] == documents[worst]["id"]
    assert row["worst"]["percent"] == pytest.approx(100 * (on[worst] / off[worst] - 1), abs=1e-3)
    assert row["worst"]["bits"] == pytest.approx((on[worst] - off[worst]) / math.log(2), abs=1e-3)


def test_a_sample_is_of_the_whole_file_and_a_larger_one_contains_a_smaller_one(
    model: LanguageModel, tmp_path: Path
) -> None:
    rows = [{"id": f"{number}", "text": "the index of a chunk " * (1 + number % 7)} for number in range(300)]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = drawn(model, path)
    assert [text.id for text in whole] == [row["id"] for row in rows]
    samples = {most: drawn(model, path, max_tokens=most) for most in (100, 1000)}
    small, large = ({int(text.id) for text in sample} for sample in samples.values())
    assert small < large < set(range(300))
    assert all(sum(len(text.tokens) - 1 for text in sample) <= most for most, sample in samples.items())
    assert len({number // 60 for number in large}) == 5
    assert [text.id for text in drawn(model, path, max_tokens=1000, seed=1)] != [text.id for text in samples[1000]]


def test_documents_are_cut_to_a_window_and_to_the_number_of_tokens(model: LanguageModel, corpus: Path) -> None:
    assert max(len(text.tokens) for text in drawn(model, corpus)) == model.context == 64
    assert max(len(text.tokens) for text in drawn(model, corpus, window=32)) == 32
    (only,) = drawn(model, corpus, max_tokens=10, text_windows="beginning")
    assert len(only.tokens) == 11
    assert only.tokens[0] == model.tokenizer.bos_id


def test_windows_are_from_everywhere_in_the_documents_and_the_seed_draws_them(
    model: LanguageModel, corpus: Path
) -> None:
    documents = {row["id"]: row["text"] for row in map(json.loads, corpus.read_text().splitlines())}
    whole = {name: np.append(model.tokenizer.bos_id, model.tokenizer.encode(text)) for name, text in documents.items()}
    windows, starts = drawn(model, corpus), list[float]()
    for text in windows:
        tokens, size = whole[text.id], len(text.tokens)
        found = [
            first
            for first in range(len(tokens) - size + 1)
            if np.array_equal(tokens[first : first + size], text.tokens)
        ]
        assert found
        assert text.begins == (found[0] == 0)
        assert size == min(len(tokens), model.context)
        if len(tokens) > size:
            starts.append(found[0] / (len(tokens) - size))
    assert 0.3 < np.mean(starts) < 0.7
    assert [text.tokens.tolist() for text in drawn(model, corpus)] == [text.tokens.tolist() for text in windows]
    assert [text.tokens.tolist() for text in drawn(model, corpus, seed=1)] != [text.tokens.tolist() for text in windows]


def test_a_window_inside_of_a_document_counts_the_bytes_of_its_scored_tokens(
    model: LanguageModel, corpus: Path
) -> None:
    text = next(text for text in drawn(model, corpus) if not text.begins)
    decoded = model.tokenizer.token_bytes[text.tokens[1:]].sum()
    assert num_bytes(text, model.tokenizer) == decoded
    assert num_bytes(text._replace(begins=True), model.tokenizer) == decoded - model.tokenizer.meta.added_bytes


def test_of_a_long_text_one_part_is_tokenized(
    model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_texts, "PIECE", 300)
    path = tmp_path / "long.jsonl"
    words = " ".join(f"chunk {number}" for number in range(2000))
    path.write_text("".join(json.dumps({"id": str(number), "text": words}) + "\n" for number in range(30)))
    windows = drawn(model, path, window=32)
    assert len({text.tokens.tobytes() for text in windows}) > 20
    beginnings = drawn(model, path, window=32, text_windows="beginning")
    assert len({text.tokens.tobytes() for text in beginnings}) == 1
    assert all(text.begins for text in beginnings)


def test_paths_without_text_name_the_file_and_the_key(model: LanguageModel, tmp_path: Path) -> None:
    (tmp_path / "body.jsonl").write_text('{"body": "the index"}\n')
    with pytest.raises(
        InputError, match=r"texts: .*body\.jsonl.*no document with text.*'text' leads to nothing; keys: body"
    ):
        drawn(model, tmp_path / "body.jsonl")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match=r"texts: .*empty\.txt.*no document with text"):
        drawn(model, tmp_path / "empty.txt")


def test_tokens_of_another_tokenizer_are_refused(model: LanguageModel, tmp_path: Path) -> None:
    write_megatron(tmp_path / "tokens.bin", [[[3, 60_000]]])
    with pytest.raises(InputError, match=r"tokens\.bin: document 1 holds the token id 60000"):
        drawn(model, tmp_path / "tokens.bin")
