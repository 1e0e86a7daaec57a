"""A Hugging Face tokenizer counts bytes and ignores dropout; a damaged one is an error of one line."""

import base64
import json
import sys

import pytest
import tokenizers

from indexing.store.errors import InputError
from indexing.tokenization.metadata import HUGGINGFACE_MODEL
from tests.indexing.tokenization.models import TEXTS, byte_level, check_round_trip, install_huggingface


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


def test_dropout_of_merges_is_not_used(tmp_path):
    plain = install_huggingface(byte_level(tmp_path / "hf") / HUGGINGFACE_MODEL, tmp_path / "plain")
    file = tmp_path / "hf" / HUGGINGFACE_MODEL
    content = json.loads(file.read_text())
    content["model"]["dropout"] = 0.9
    file.write_text(json.dumps(content))
    dropped = install_huggingface(file, tmp_path / "t")
    assert [dropped.encode(text).tolist() for text in TEXTS] == [plain.encode(text).tolist() for text in TEXTS]


def test_missing_package_is_reported_with_the_command_that_installs_it(tmp_path, monkeypatch):
    source = byte_level(tmp_path / "hf")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"pip install 'retro\[transformer\]'"):
        install_huggingface(source, tmp_path / "t")


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
