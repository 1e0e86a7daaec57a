"""Models from other projects are installed with all special tokens, or refused with the reason."""

import json

import numpy as np
import pytest
import sentencepiece
import tokenizers

from indexing.store.errors import InputError
from indexing.tokenization.installation import install_tokenizer
from indexing.tokenization.metadata import HUGGINGFACE_MODEL, MODEL, read_meta, read_token_bytes
from indexing.tokenization.settings import TokenizerSettings
from indexing.tokenization.tokenizer import Tokenizer
from tests.indexing.tokenization.models import (
    DIFFICULT,
    TEXTS,
    byte_level,
    check_round_trip,
    foreign_model,
    install_huggingface,
    train,
)


def test_sentencepiece_model_with_default_options_is_accepted_as_lossy(tmp_path):
    path = foreign_model(tmp_path / "tokenizer.model")  # nmt_nfkc, dummy prefix, no bytes, no pad
    install_tokenizer(TokenizerSettings(kind="sentencepiece", path=str(tmp_path)), tmp_path / "t")  # its folder
    tokenizer = Tokenizer.open(tmp_path / "t")
    size = sentencepiece.SentencePieceProcessor(model_file=str(path)).get_piece_size()
    assert not tokenizer.meta.lossless
    assert (tokenizer.pad_id, tokenizer.vocab_size) == (size, size + 1)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    ids = [tokenizer.bos_id, *tokenizer.encode("The quick brown fox"), tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.decode(ids) == "The quick brown fox"
    assert tokenizer.meta.added_bytes == 1
    assert int(tokenizer.token_bytes[ids].sum()) == len("The quick brown fox") + 1


@pytest.mark.parametrize(("bos", "eos", "expected"), [(-1, 1, (1, 1)), (1, -1, (1, 1)), (-1, -1, ("new", "new"))])
def test_missing_begin_or_end_id_is_replaced_by_the_other_or_a_new_id(tmp_path, bos, eos, expected):
    path = foreign_model(tmp_path / "their.model", bos_id=bos, eos_id=eos)
    install_tokenizer(TokenizerSettings(kind="sentencepiece", path=str(path)), tmp_path / "t")
    meta = read_meta(tmp_path / "t")
    size = sentencepiece.SentencePieceProcessor(model_file=str(path)).get_piece_size()
    assert (meta.bos_id, meta.eos_id) == tuple(size if value == "new" else value for value in expected)
    assert meta.pad_id == meta.vocab_size - 1
    assert len(read_token_bytes(tmp_path / "t")) == meta.vocab_size == size + 1 + expected.count("new") // 2


def test_own_model_installed_elsewhere_remains_lossless(tmp_path):
    first = train(tmp_path / "first")
    install_tokenizer(
        TokenizerSettings(kind="sentencepiece", path=str(tmp_path / "first" / MODEL)), tmp_path / "second"
    )
    second = Tokenizer.open(tmp_path / "second")
    assert second.meta == type(first.meta)(**{**vars(first.meta), "kind": "sentencepiece"})
    assert np.array_equal(first.token_bytes, second.token_bytes)
    check_round_trip(second, "a\u2581b")


def test_hugging_face_byte_level_tokenizer_is_lossless(tmp_path):
    end = "<|endoftext|>"
    config = {"bos_token": end, "eos_token": {"content": end}, "pad_token": end}
    tokenizer = install_huggingface(byte_level(tmp_path / "hf", config), tmp_path / "t")
    assert tokenizer.meta.lossless
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 0)
    assert tokenizer.pad_id == tokenizer.vocab_size - 1 == 400  # the padding token is never the end token
    for text in [*DIFFICULT, *TEXTS, end]:
        check_round_trip(tokenizer, text)
    assert tokenizer.decode([0, *tokenizer.encode("a b"), 0, tokenizer.pad_id]) == "a b"


@pytest.mark.parametrize(("ids", "expected"), [({"bos_token_id": 3, "eos_token_id": [5, 6]}, (3, 5)), ({}, (400, 400))])
def test_begin_and_end_missing_in_the_tokenizer_come_from_the_model_configuration(tmp_path, ids, expected):
    source = byte_level(tmp_path / "hf")
    (source / "config.json").write_text(json.dumps({"eos_token_id": 10**6} | ids))
    meta = install_huggingface(source, tmp_path / "t").meta
    assert (meta.bos_id, meta.eos_id) == expected


@pytest.mark.parametrize(
    ("config", "puts_bos_in_front", "begin"),
    [({}, True, 1), ({}, False, 2), ({"add_bos_token": True}, False, 1), ({"add_bos_token": False}, True, 2)],
)
def test_a_document_begins_with_bos_only_if_the_models_tokenizer_puts_it_in_front(
    tmp_path, config, puts_bos_in_front, begin
):
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    source = byte_level(tmp_path / "hf", names | config)
    tokenizer = tokenizers.Tokenizer.from_file(str(source / HUGGINGFACE_MODEL))
    tokenizer.add_special_tokens([*names.values()])
    ids = {name: tokenizer.token_to_id(name) for name in names.values()}
    if puts_bos_in_front:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", ids["<s>"])])
    tokenizer.save(str(source / HUGGINGFACE_MODEL))
    installed = install_huggingface(source, tmp_path / "t")
    # <|endoftext|>, which `byte_level` has, ends the document before; EOS of a chat model can be the end of a turn
    assert installed.bos_id == {1: ids["<s>"], 2: tokenizer.token_to_id("<|endoftext|>")}[begin]
    assert installed.eos_id == ids["</s>"]
    assert installed.has_bos == (begin == 1)


def test_hugging_face_tokenizer_without_special_tokens_gets_new_ones(tmp_path):
    tokenizer = install_huggingface(byte_level(tmp_path / "hf") / HUGGINGFACE_MODEL, tmp_path / "t")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (400, 400, 401, 402)


def test_word_pieces_are_accepted_as_lossy(tmp_path):
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3, "the": 4, "fox": 5, "##es": 6}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]"])
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    (tmp_path / "hf").mkdir()
    tokenizer.save(str(tmp_path / "hf" / HUGGINGFACE_MODEL))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "bos_token": None}
    (tmp_path / "hf" / "special_tokens_map.json").write_text(json.dumps(names))
    opened = install_huggingface(tmp_path / "hf", tmp_path / "t")
    assert not opened.meta.lossless
    assert (opened.bos_id, opened.eos_id, opened.pad_id, opened.vocab_size) == (1, 2, 3, 7)
    assert opened.decode([1, *opened.encode("the foxes"), 2, 3]) == "the foxes"


def test_file_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "bad.model").write_bytes(b"not a model")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "other.json").write_text('{"vocab": 1}')
    for kind, name, message in [
        ("sentencepiece", "none.model", "is not a file"), ("sentencepiece", "bad.model", "not a SentencePiece model"),
        ("huggingface", ".", "does not exist"), ("huggingface", "bad.json", "is not JSON"),
        ("huggingface", "other.json", "'model'"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=message) as error:
            install_tokenizer(TokenizerSettings(kind=kind, path=str(tmp_path / name)), tmp_path / "t")
        assert str(tmp_path / name) in str(error.value)
        assert f"{tmp_path / 't'}/" not in str(error.value)
    with pytest.raises(InputError, match="no finished tokenizer"):
        Tokenizer.open(tmp_path / "t")
