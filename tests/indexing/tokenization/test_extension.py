"""An extended tokenizer keeps old ids and the ids of other texts, uses its new pieces, and is lossless."""

import json
import logging
import re
import unicodedata
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from indexing.store.errors import InputError
from indexing.tokenization.extension import Extension, compare, extend, open_base
from indexing.tokenization.extension_sentencepiece import CONTROL, NORMAL, parse, with_pieces
from indexing.tokenization.installation import install_tokenizer
from indexing.tokenization.metadata import _PROBES, MODEL
from indexing.tokenization.settings import TokenizerSettings
from indexing.tokenization.training import train_sentencepiece
from tests.indexing.tokenization.models import ANY_TEXT, CODE, DIFFICULT, foreign_model

ENGLISH = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs, please.\n\n" * 3,
    "Sphinx of black quartz, judge my vow; how vexingly quick daft zebras jump! It isn't 1984, is it?\n" * 3,
    CODE * 3,
]
CHINESE = [
    f"{who}{how}{what}，依照本法第{number}条的规定办理。"
    for (number, who), how, what in product(
        enumerate(["全国人民代表大会", "地方各级人民政府", "公民、法人和其他组织", "TiDB 数据库集群"]),
        ["应当依法制定", "不得擅自变更", "可以申请查询"],
        ["社会主义市场经济的法律", "环境保护的管理制度", "数据安全的技术标准"],
    )
]
ASCII_TEXT = st.text(st.characters(max_codepoint=127), max_size=60)
MIXED_TEXT = st.lists(st.sampled_from([*DIFFICULT, *CHINESE, "人民", "法", "the "]), max_size=8).map("".join)
NEW = 40


def ours(folder: Path, kind: str) -> Path:
    train_sentencepiece(ENGLISH, TokenizerSettings(kind=kind, vocab_size=400), folder)  # type: ignore[arg-type]
    return folder / MODEL


def foreign(folder: Path, kind: str, **changes: object) -> Path:
    """A foreign model: it normalizes text, adds a space before it, and has no padding token."""
    options = {"model_type": kind, "vocab_size": 400, "byte_fallback": True, **changes}
    return foreign_model(folder / "tokenizer.model", ENGLISH, **options).parent


def byte_level(folder: Path, split: str, added: list[str], **config: object) -> Path:
    """A byte-level tokenizer like GPT-2's or, with a splitting expression, Qwen's. Added tokens follow the vocabulary."""
    folder.mkdir(parents=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split:
        cut = pre_tokenizers.Split(Regex(split), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(ENGLISH, trainer)
    tokenizer.add_special_tokens(added)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def llama(folder: Path) -> Path:
    """A tokenizer like Llama's: ▁ for spaces, byte tokens, no words, merges in the format of older `tokenizers`."""
    folder.mkdir(parents=True)
    characters = sorted({*"".join(ENGLISH).replace(" ", "▁"), "▁", "e"} - {"\n", "\t", "\r"})
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("▁", "a"), ("▁", "▁"), ("i", "n"), ("q", "u")]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters, *map("".join, merges)]
    vocabulary = {name: number for number, name in enumerate(names)}
    model = tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    content = json.loads(tokenizer.to_str())
    content["model"]["merges"] = [" ".join(pair) for pair in merges]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


END = "<|endoftext|>"
QWEN = r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
BASES: dict[str, Callable[[Path], Path]] = {
    "bpe": lambda folder: ours(folder, "bpe"),
    "unigram": lambda folder: ours(folder, "unigram"),
    "their bpe": lambda folder: foreign(folder, "bpe"),
    "gpt2": lambda folder: byte_level(folder, "", [END], eos_token=END, bos_token=END, pad_token=END),
    "qwen": lambda folder: byte_level(
        folder, QWEN, [END, "<|im_start|>"], eos_token={"__type": "AddedToken", "content": END}
    ),
    "llama": llama,
}


@pytest.fixture(scope="module", params=BASES)
def base(request, tmp_path_factory) -> Path:
    return BASES[request.param](tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def extension(base, tmp_path_factory) -> Extension:
    return extend(open_base(base), CHINESE, [], NEW, tmp_path_factory.mktemp("extended"))


def text_of(extension: Extension, token: int) -> bytes:
    """The bytes that a token adds to a text, according to the vocabulary's alphabet."""
    piece = extension.pieces[token - extension.old.vocab_size]
    if extension.kind == "huggingface" and extension.old.meta.lossless:  # byte-level
        table = dict(zip(sorted(pre_tokenizers.ByteLevel.alphabet()), BYTES, strict=True))
        return bytes(map(table.__getitem__, piece))
    return piece.encode()


# Of the sorted alphabet.
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256), *range(33), *range(127, 161), 173]


# --- unchanged ids and texts


def test_old_ids_are_unchanged_and_new_ids_follow_them(extension):
    old, new = extension.old, extension.tokenizer
    assert (new.pad_id, new.bos_id, new.eos_id) == (old.pad_id, old.bos_id, old.eos_id)
    assert new.vocab_size == old.vocab_size + len(extension.pieces)
    assert NEW / 2 < len(extension.pieces) == len(set(extension.pieces)) <= NEW
    assert new.token_bytes[: old.vocab_size].tolist() == old.token_bytes.tolist()
    for token in range(old.vocab_size):
        assert old.decode([token]) == new.decode([token])


@settings(max_examples=12, deadline=None)
@given(text=st.one_of(ASCII_TEXT, st.sampled_from(ENGLISH)))
def test_ascii_texts_keep_their_ids(extension, text):
    assert extension.tokenizer.encode(text).tolist() == extension.old.encode(text).tolist()


@settings(max_examples=12, deadline=None)
@given(text=st.one_of(ANY_TEXT, MIXED_TEXT))
def test_extended_tokenizer_decodes_texts_like_its_base(extension, text):
    old, new = extension.old, extension.tokenizer
    assert new.meta.lossless == old.meta.lossless
    ids = new.encode(text)
    assert new.decode(ids) == old.decode(old.encode(text))
    assert not {new.pad_id, new.bos_id, new.eos_id} & set(ids.tolist())
    if old.meta.lossless:
        assert new.decode(ids) == text
        assert int(new.token_bytes[ids].sum()) == len(text.encode())


def test_difficult_texts_decode_like_with_the_base(extension):
    for text in [*_PROBES, *DIFFICULT, *CHINESE]:
        old, new = extension.old, extension.tokenizer
        assert new.decode(new.encode(text)) == old.decode(old.encode(text))


def test_kept_texts_keep_their_ids(base, tmp_path):
    kept = ["大会的人", "制度，制定。"]
    free, bound = (extend(open_base(base), CHINESE, texts, 10**4, tmp_path) for texts in ([], kept))
    assert compare(free, kept).unchanged < len(kept)
    assert compare(bound, kept).unchanged == len(kept)
    assert set(bound.pieces) < set(free.pieces)
    assert compare(bound, CHINESE).new_tokens < compare(bound, CHINESE).old_tokens


# --- new pieces


def test_corpus_takes_fewer_tokens_and_uses_the_new_pieces(extension):
    figures = compare(extension, CHINESE)
    assert figures.new_tokens < 0.7 * figures.old_tokens
    assert figures.used > 0.3  # the others are parts of characters and pieces, needed for merges
    assert figures.num_bytes == sum(len(text.encode()) for text in CHINESE)


def test_cuts_of_a_piece_are_the_old_ids_of_its_text(extension):
    old, new = extension.old, extension.tokenizer
    assert len(extension.cuts) == len(extension.pieces)
    for number, cut in enumerate(extension.cuts):
        token, text = old.vocab_size + number, text_of(extension, old.vocab_size + number)
        assert cut
        assert max(cut) < old.num_model_tokens
        assert new.token_bytes[token] == len(text)
        assert int(old.token_bytes[cut].sum()) == len(text)


def test_same_texts_give_the_same_bytes(base, extension, tmp_path):
    again = extend(open_base(base), CHINESE, [], NEW, tmp_path)
    for file in sorted(tmp_path.iterdir()):
        other = extension.path / file.name if extension.path.is_dir() else extension.path
        assert file.read_bytes() == other.read_bytes()
    assert again.cuts == extension.cuts


def test_ascii_pieces_are_learned_only_on_request(base, tmp_path):
    words = ["retrieval augmentation, "] * 40
    with pytest.raises(InputError, match="nothing new"):
        extend(open_base(base), words, [], NEW, tmp_path)
    extension = extend(open_base(base), words, [], NEW, tmp_path, ascii=True)
    figures = compare(extension, words)
    assert figures.new_tokens < figures.old_tokens
    assert figures.unchanged == 0


def test_small_corpus_gives_fewer_pieces_and_a_warning(base, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="retro"):
        extension = extend(open_base(base), ["中文中文"] * 3, [], NEW, tmp_path)
    assert 0 < len(extension.pieces) < NEW
    assert f"gives {len(extension.pieces)} new pieces, not {NEW}" in caplog.text


def test_extended_tokenizer_can_be_extended_again(extension, tmp_path):
    more = extend(open_base(extension.path), ["鸟兽虫鱼，花草树木。"] * 5, [], 12, tmp_path)
    assert not set(more.pieces) & set(extension.pieces)
    assert more.tokenizer.encode(CHINESE[0]).tolist() == extension.tokenizer.encode(CHINESE[0]).tolist()
    assert len(more.tokenizer.encode("鸟兽虫鱼")) < len(extension.tokenizer.encode("鸟兽虫鱼"))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_base_without_byte_tokens_learns_characters_unknown_to_it(tmp_path, kind):
    base = open_base(foreign(tmp_path / "base", kind, vocab_size=100, byte_fallback=False))
    texts = [unicodedata.normalize("NFKC", re.sub("[0-9]", "", text)) for text in CHINESE[:27]]
    extension = extend(base, texts, [], 400, tmp_path)
    assert extension.old.decode(extension.old.encode(texts[0])) != texts[0]
    assert [extension.tokenizer.decode(extension.tokenizer.encode(text)) for text in texts] == texts
    assert {token for cut in extension.cuts for token in cut} == {0}


# --- files


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_file_begins_with_its_base_and_is_parsed_like_the_library(tmp_path, kind):
    file = ours(tmp_path / "base", kind)
    extension = extend(open_base(file), CHINESE, [], NEW, tmp_path)
    data = extension.path.read_bytes()
    assert data.startswith(file.read_bytes())
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    pieces = parse(data).pieces
    assert [each.piece for each in pieces] == [processor.id_to_piece(number) for number in range(len(processor))]
    assert [each.score for each in pieces] == [processor.get_score(number) for number in range(len(processor))]
    assert [each.type == CONTROL for each in pieces] == list(map(processor.is_control, range(len(processor))))
    with pytest.raises(InputError, match="cut short"):
        parse(data[:-1])


def test_added_special_tokens_keep_their_ids_as_pieces(tmp_path):
    file = foreign(tmp_path / "base", "bpe")
    extension = extend(open_base(file), CHINESE, [], NEW, tmp_path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(extension.path))
    assert processor.pad_id() == extension.old.pad_id == extension.old.vocab_size - 1 == extension.old.num_model_tokens
    taken = with_pieces((file / "tokenizer.model").read_bytes(), [("<pad>", -1e4, NORMAL)], {})
    (tmp_path / "taken.model").write_bytes(taken)
    extension = extend(open_base(tmp_path / "taken.model"), CHINESE, [], NEW, tmp_path)
    assert extension.tokenizer.pad_id == extension.old.pad_id == len(parse(taken).pieces)


def test_tokenizer_of_a_datastore_keeps_its_special_tokens(tmp_path):
    source = BASES["gpt2"](tmp_path / "base")
    install_tokenizer(TokenizerSettings(kind="huggingface", path=str(source)), tmp_path / "datastore" / "tokenizer")
    extension = extend(open_base(tmp_path / "datastore"), CHINESE, [], NEW, tmp_path)
    assert extension.tokenizer.bos_id == extension.tokenizer.eos_id == extension.old.eos_id
    direct = extend(open_base(source), CHINESE, [], NEW, tmp_path)
    assert (direct.old.meta, direct.tokenizer.meta) == (extension.old.meta, extension.tokenizer.meta)
    assert (direct.pieces, direct.cuts) == (extension.pieces, extension.cuts)


@pytest.mark.parametrize("name", ["gpt2", "qwen", "llama"])
def test_transformers_encodes_like_the_extended_tokenizer_json(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    extension = extend(open_base(BASES[name](tmp_path / "base")), CHINESE, [], NEW, tmp_path / "base" / "..")
    theirs = transformers.AutoTokenizer.from_pretrained(extension.path)
    assert len(theirs) == extension.tokenizer.vocab_size
    assert (theirs.pad_token_id, theirs.eos_token_id) == (extension.old.pad_id, extension.old.eos_id)
    for text in [*CHINESE, *ENGLISH]:
        assert theirs.encode(text, add_special_tokens=False) == extension.tokenizer.encode(text).tolist()


def test_old_token_boundaries_are_kept(tmp_path):
    """Merges come after all old ones, so every new token of a tokenizer.json is a sequence of old tokens."""
    extension = extend(open_base(BASES["qwen"](tmp_path / "base")), CHINESE, [], NEW, tmp_path)
    for text in CHINESE:
        joined: list[int] = []
        for token in extension.tokenizer.encode(text).tolist():
            joined += extension.cuts[token - extension.old.vocab_size] if token >= extension.old.vocab_size else [token]
        assert joined == extension.old.encode(text).tolist()


# --- mistakes


def test_unsupported_tokenizers_are_refused_with_the_reason(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.save(str(tmp_path / "words.json"))
    foreign_model(tmp_path / "words.model", ENGLISH, model_type="char")
    parts = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "a</w>": 1}, [], end_of_word_suffix="</w>"))
    parts.save(str(tmp_path / "parts.json"))
    for name, message in [
        ("none", "is not a tokenizer"), ("", "is not a tokenizer"), ("words.json", "WordPiece"),
        ("words.model", "words or characters"), ("parts.json", "end_of_word_suffix"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=message):
            open_base(tmp_path / name)


def test_extension_without_new_pieces_is_refused(base, tmp_path):
    with pytest.raises(InputError, match="nothing new"):
        extend(open_base(base), ENGLISH, [], NEW, tmp_path)
    with pytest.raises(InputError, match="nothing new"):
        extend(open_base(base), CHINESE, CHINESE, NEW, tmp_path)
