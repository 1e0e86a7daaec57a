"""Our tokenizers are lossless, and token sizes sum to the size of the text."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexing.corpus.documents import CorpusSettings
from indexing.corpus.scan import list_files, read_documents, strict_problem
from indexing.tokenization.tokenizer import Tokenizer
from tests.indexing.tokenization.models import ANY_TEXT, DIFFICULT, TEXTS, check_round_trip, train

TRICKY_TEXT = st.lists(st.sampled_from([*DIFFICULT, "a", "中", "the ", "1"]), max_size=12).map("".join)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def trained(request, tmp_path_factory) -> Tokenizer:
    return train(tmp_path_factory.mktemp(request.param), kind=request.param)


def test_difficult_texts_round_trip_exactly(trained):
    assert trained.meta.lossless
    for text in [*DIFFICULT, *TEXTS]:
        check_round_trip(trained, text)
        check_round_trip(trained, f"x{text}y")


@settings(max_examples=150, deadline=None)
@given(text=st.one_of(ANY_TEXT, TRICKY_TEXT))
def test_any_text_round_trips_and_token_bytes_sum_to_its_size(trained, text):
    check_round_trip(trained, text)


def test_every_character_round_trips(trained):
    characters = [chr(code) for code in range(0x30000) if not 0xD800 <= code < 0xE000]
    text = "".join(characters)
    assert trained.decode(trained.encode(text)) == text


def test_batches_equal_their_texts_one_by_one(trained):
    texts = [*DIFFICULT, *TEXTS]
    rows = trained.encode_batch(texts)
    assert [row.tolist() for row in rows] == [trained.encode(text).tolist() for text in texts]
    rows.append(np.array([trained.bos_id, *rows[-1], trained.eos_id, trained.pad_id]))
    assert trained.decode_batch(rows) == [*texts, TEXTS[-1]] == [trained.decode(row) for row in rows]
    assert trained.encode_batch([]) == trained.decode_batch([]) == []


def test_special_tokens_decode_to_no_text(trained):
    assert len({trained.pad_id, trained.bos_id, trained.eos_id}) == 3
    ids = [trained.bos_id, *trained.encode(" a ").tolist(), trained.eos_id, trained.pad_id, trained.pad_id]
    assert trained.decode(ids) == trained.decode(np.array(ids)) == " a "
    assert trained.token_bytes[[trained.pad_id, trained.bos_id, trained.eos_id]].tolist() == [0, 0, 0]
    assert trained.token_bytes.shape == (trained.vocab_size,)
    assert trained.meta.added_bytes == 0


def test_partial_characters_and_lone_surrogates_decode_to_replacement_characters(trained):
    ids = trained.encode("\U0001f9ff")
    assert len(ids) == 4
    assert set(trained.decode(ids[:2])) == {"\ufffd"}
    assert trained.decode(trained.encode("a\ud800b")) == "a\ufffdb"


def test_ids_take_two_bytes_up_to_65536_tokens(trained):
    assert trained.dtype == np.uint16
    for vocab_size, dtype in ((65536, np.uint16), (65537, np.uint32)):
        assert type(trained.meta)(**{**vars(trained.meta), "vocab_size": vocab_size}).dtype == dtype


DATA = Path(__file__).parents[4] / "shared" / "data"


@pytest.mark.skipif(not DATA.exists(), reason="the shared data is not here")
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_real_documents_round_trip_exactly(tmp_path, kind):
    texts = []
    for name in ("python_peps/peps", "zh_laws/laws", "msdocs_cpp/docs"):
        (file,) = list_files(CorpusSettings(paths=(str(DATA / f"{name}.jsonl.zst"),)))
        texts += [item.text for item in read_documents(file, CorpusSettings(), stop=40, on_problem=strict_problem)]
    tokenizer = train(tmp_path, texts, kind=kind, vocab_size=4096, sample_bytes=2**19)
    assert tokenizer.vocab_size == 4096
    total_bytes = total_tokens = 0
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(ids) == text
        assert int(tokenizer.token_bytes[ids].sum(dtype=np.int64)) == len(text.encode())
        total_bytes += len(text.encode())
        total_tokens += len(ids)
    assert total_tokens < total_bytes / 3
