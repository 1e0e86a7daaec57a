"""Training is reproducible and possible on any corpus; its sample is uniform."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from indexing.store.errors import InputError
from indexing.tokenization.metadata import MODEL
from indexing.tokenization.training import TextSample
from tests.indexing.tokenization.models import DIFFICULT, TEXTS, check_round_trip, train


def test_white_space_in_code_takes_few_tokens(tmp_path):
    tokenizer = train(tmp_path)
    for text in ("\n", "\n\n", "\n\n\n\n", "\t", "\t\t\t", "\r\n", "    ", "        "):
        assert len(tokenizer.encode(text)) == 1, repr(text)
    assert len(tokenizer.encode("2024")) == 4  # one token per digit


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_training_gives_the_same_bytes_in_another_process(tmp_path, kind):
    program = (
        "import sys, json; from pathlib import Path; from indexing.tokenization.training import *\n"
        f"texts = json.loads(sys.stdin.read()); settings = TokenizerSettings(kind={kind!r}, vocab_size=700)\n"
        f"train_sentencepiece(iter(texts), settings, Path({str(tmp_path)!r}) / 'other')"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", program], input=json.dumps(TEXTS).encode(), check=True, cwd=root)
    train(tmp_path / "here", kind=kind)
    for name in (MODEL, "meta.json", "token_bytes.npy"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "texts",
    [["a"], ["\n\n"], ["\t"], ["\u2585\u2585"], ["\u2581"], [" "], ["\x00"], ["\ud800"], ["short chunk", "one"] * 5,
     ["x" * 5000], ["", "中文"], ["".join(map(chr, range(0x4E00, 0x6000)))]],
)  # fmt: skip
@pytest.mark.parametrize("vocab_size", [320, 8192])
def test_tokenizer_can_be_trained_on_any_small_corpus(tmp_path, kind, texts, vocab_size):
    tokenizer = train(tmp_path, texts, kind=kind, vocab_size=vocab_size)
    assert 266 <= tokenizer.vocab_size <= vocab_size
    for text in DIFFICULT:
        check_round_trip(tokenizer, text)


def test_corpus_without_text_is_refused(tmp_path):
    for texts in ([], ["", ""]):
        with pytest.raises(InputError, match="no text"):
            train(tmp_path, texts)


def test_rare_characters_do_not_take_the_vocabulary_of_words(tmp_path):
    rare = "".join(map(chr, range(0x4E00, 0x7000)))
    tokenizer = train(tmp_path, [*TEXTS, rare], vocab_size=400)
    assert tokenizer.vocab_size == 400
    check_round_trip(tokenizer, rare)


def test_sample_is_uniform_reproducible_and_of_the_requested_size():
    def sample_of(texts: list[str], size: int, seed: int) -> list[str]:
        sample = TextSample(size, seed)
        for text in texts:
            sample.add(text)
        return sample.pieces()

    texts = [f"{number:04d}" * 512 for number in range(1000)]  # two pieces each
    sample = sample_of(texts, 100 * 1024, seed=1)
    assert sample == sample_of(texts, 100 * 1024, seed=1) != sample_of(texts, 100 * 1024, seed=2)
    assert len(sample) == 100
    numbers = [int(piece[:4]) for piece in sample]
    assert numbers == sorted(numbers)
    assert 400 < np.mean(numbers) < 600
    assert "".join(sample_of(["a" * 3000, "", "中"], 10**6, seed=0)) == "a" * 3000 + "中"
