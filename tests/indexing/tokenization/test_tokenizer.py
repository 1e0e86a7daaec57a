"""Tokenizers are lossless, token sizes sum to the size of the text, and training is reproducible on any corpus."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from indexing.corpus.scan import CorpusSettings, list_files, read_documents, strict_problem
from indexing.store.errors import InputError
from indexing.tokenization.installation import install_tokenizer
from indexing.tokenization.metadata import HUGGINGFACE_MODEL, MODEL, read_meta, read_token_bytes
from indexing.tokenization.settings import TokenizerSettings
from indexing.tokenization.tokenizer import Tokenizer
from indexing.tokenization.training import TextSample, train_sentencepiece

CODE = "def f(x):\n    if x:\n        return 1\n\n\n    return {\n\t\t'a': 12,\r\n\t}\n"
TEXTS = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs, please.\n\n" * 5,
    CODE * 5,
    "中华人民共和国的法律，由全国人民代表大会制定。第一条 为了发展社会主义市场经济。\n" * 5,
]
DIFFICULT = [
    "", " ", "\n", "  a   b ", "\ta\t\tb\t\t\t\t\t", "a\r\nb\rc\r\n\r\n\r\n", "\u2581", " \u2581\u2581 x\u2581",
    "\u2585",
    "\x00", "a\x00b", "\ufffd", "\ufeff", "<s>", "</s><pad><unk>", "<0x0A>", "<0xE2><0x96>", "\u2028\x85", "𠀀",
    "\U0001f642\U0001f469\u200d\U0001f467", "e\u0301é\u212b", "Ａ½ﬁ\u3000\u00a0", "\U0010ffff", " ⁇ ", "\n" * 9,
    " " * 40, CODE,
]  # fmt: skip
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
TRICKY_TEXT = st.lists(st.sampled_from([*DIFFICULT, "a", "中", "the ", "1"]), max_size=12).map("".join)


def train(folder: Path, texts: list[str] = TEXTS, **options: object) -> Tokenizer:
    train_sentencepiece(texts, TokenizerSettings(**{"vocab_size": 700, **options}), folder)  # type: ignore[arg-type]
    return Tokenizer.open(folder, num_threads=2)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def trained(request, tmp_path_factory) -> Tokenizer:
    return train(tmp_path_factory.mktemp(request.param), kind=request.param)


def check_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == tokenizer.dtype
    assert tokenizer.decode(ids) == text
    assert int(tokenizer.token_bytes[ids].sum(dtype=np.int64)) == len(text.encode())
    assert not {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist())


# --- trained models


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


def test_white_space_in_code_takes_few_tokens(tmp_path):
    tokenizer = train(tmp_path)
    for text in ("\n", "\n\n", "\n\n\n\n", "\t", "\t\t\t", "\r\n", "    ", "        "):
        assert len(tokenizer.encode(text)) == 1, repr(text)
    assert len(tokenizer.encode("2024")) == 4  # one token per digit


def test_training_gives_the_same_bytes_in_another_process(tmp_path, trained):
    kind = trained.meta.kind
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


def test_ids_take_two_bytes_up_to_65536_tokens(trained):
    assert trained.dtype == np.uint16
    for vocab_size, dtype in ((65536, np.uint16), (65537, np.uint32)):
        assert type(trained.meta)(**{**vars(trained.meta), "vocab_size": vocab_size}).dtype == dtype


# --- models from other projects


def foreign_model(path: Path, texts: list[str] = TEXTS, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as writer:
        arguments = {"vocab_size": 300, "hard_vocab_limit": False, "minloglevel": 2, **options}
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=writer, **arguments)
    return path


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


def byte_level(folder: Path, config: dict[str, object] | None = None) -> Path:
    """A byte-level BPE like GPT-2's, in Hugging Face's format."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.enable_truncation(5)
    tokenizer.save(str(folder / HUGGINGFACE_MODEL))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def install_huggingface(source: Path, folder: Path) -> Tokenizer:
    install_tokenizer(TokenizerSettings(kind="huggingface", path=str(source)), folder)
    return Tokenizer.open(folder)


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


def test_metaspace_with_byte_tokens_counts_bytes(tmp_path):
    vocabulary = {
        "<unk>": 0,
        **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)},
        "\u2581": 257,
        "a": 258,
        "\u2581a": 259,
    }
    model = tokenizers.models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    (tmp_path / "hf").mkdir()
    tokenizer.save(str(tmp_path / "hf" / HUGGINGFACE_MODEL))
    opened = install_huggingface(tmp_path / "hf", tmp_path / "t")
    assert not opened.meta.lossless  # ▁ decodes to a space
    for text in (" a a中\n", "aa a"):
        check_round_trip(opened, text)


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


# --- mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [({"kind": "wordpiece"}, "kind"), ({"kind": "sentencepiece"}, r"tokenizer\.path is empty"),
     ({"path": "x.model"}, r"tokenizer\.path"), ({"vocab_size": 256}, "vocab_size = 256"),
     ({"sample_bytes": 0}, "sample_bytes")],
)  # fmt: skip
def test_invalid_setting_is_refused_with_its_key(options, message):
    with pytest.raises(InputError, match=message):
        TokenizerSettings(**options)


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


def test_missing_package_is_reported_with_the_command_that_installs_it(tmp_path, monkeypatch):
    source = byte_level(tmp_path / "hf")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"pip install 'retro\[transformer\]'"):
        install_huggingface(source, tmp_path / "t")


def test_settings_and_metadata_are_read_without_optional_packages(tmp_path):
    vocab_size = train(tmp_path).vocab_size
    program = (
        "import sys\n"
        "for name in ('sentencepiece', 'pyarrow', 'tokenizers', 'fsspec', 'zstandard'): sys.modules[name] = None\n"
        "from pathlib import Path; import indexing.corpus.scan; from indexing.tokenization.metadata import *\n"
        "from indexing.tokenization.settings import TokenizerSettings\n"
        f"folder = Path({str(tmp_path)!r}); TokenizerSettings(); indexing.corpus.scan.CorpusSettings()\n"
        "print(read_meta(folder).vocab_size, len(read_token_bytes(folder)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    assert run.stdout.split() == [str(vocab_size)] * 2


# --- real text

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


def precompiled(table: bytes) -> dict[str, object]:
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated", "invert": False}},
         "cannot use this tokenizer .*parenthesis"),
        (precompiled(b"\xff\xff\xff\x7f" + b"a" * 40), "precompiled_charsmap is damaged"),
        (precompiled(b"a"), "precompiled_charsmap is damaged"),
        ({"normalizer": {"type": "Sequence", "normalizers": [precompiled(b"")["normalizer"]]}}, "precompiled_charsmap is damaged"),
        (precompiled((32).to_bytes(4, "little") + bytes(range(1, 100))), "cannot use this tokenizer .*out of bounds"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"}}, "'a' has the id 4294967295; accepted"),
        ({"model": {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}}, "'a' has the id -1; accepted"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "u"}}, "Missing .UNK. token"),
        ({"added_tokens": [{"id": 2**31, "content": "<s>", "special": True}]}, "'<s>' has the id 2147483648; accepted"),
        ({"added_tokens": [{"id": 3, "content": "<s>"}]}, "added_tokens must be an array of objects with id, content, special"),
        ({"added_tokens": {"<s>": 3}}, "added_tokens must be an array"),
        ({"model": None}, "model.vocab must be an object or an array"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}, "`b` out of vocabulary"),
    ],
)  # fmt: skip
def test_a_damaged_hugging_face_tokenizer_is_an_error_of_one_line(tmp_path, changes, message):
    file = byte_level(tmp_path / "hf") / HUGGINGFACE_MODEL
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(InputError, match=message) as caught:
        install_huggingface(file, tmp_path / "t")
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "t" / "meta.json").exists()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"model":' * 100_000, "{", "[]", ""])
def test_a_file_that_is_no_json_object_is_an_error_of_one_line(tmp_path, text):
    (tmp_path / HUGGINGFACE_MODEL).write_text(text)
    with pytest.raises(InputError, match=HUGGINGFACE_MODEL):
        install_huggingface(tmp_path, tmp_path / "t")


def test_dropout_of_merges_is_not_used(tmp_path):
    plain = install_huggingface(byte_level(tmp_path / "hf") / HUGGINGFACE_MODEL, tmp_path / "plain")
    file = tmp_path / "hf" / HUGGINGFACE_MODEL
    content = json.loads(file.read_text())
    content["model"]["dropout"] = 0.9
    file.write_text(json.dumps(content))
    dropped = install_huggingface(file, tmp_path / "t")
    assert [dropped.encode(text).tolist() for text in TEXTS] == [plain.encode(text).tolist() for text in TEXTS]
