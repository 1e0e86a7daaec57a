"""Megatron tokens are stored unchanged in the datastore, and errors name incomplete pairs of files."""

import hashlib
import itertools
import json
import os
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexing.corpus.chunks import ChunkSettings, chunk_shard
from indexing.corpus.documents import CorpusSettings, Document
from indexing.corpus.megatron import open_index
from indexing.corpus.scan import FileSlice, list_files, plan_shards, read_slice, scan_file, split_of, strict_problem
from indexing.store.datastore import SPLITS, Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json
from indexing.tokenization.settings import TokenizerSettings
from indexing.tokenization.tokenizer import Tokenizer
from indexing.tokenization.training import train_sentencepiece
from tests.conftest import build_local, tiny_config, write_corpus
from tests.indexing.corpus.reading import only_file, read, to_tokens

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
Sequences = list[list[int]]  # of one document


def write_megatron(path: Path, documents: list[Sequences], dtype: str = "uint16") -> Path:
    """Write the .bin at `path` and its .idx as Megatron-LM's IndexedDatasetBuilder does; returns `path`."""
    sequences = [sequence for document in documents for sequence in document]
    size = np.dtype(dtype).itemsize
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, CODES[dtype])
    index += struct.pack("<QQ", len(sequences), len(documents) + 1)
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    position = 0
    for sequence in sequences:
        index += struct.pack("<q", position)
        position += len(sequence) * size
    first = 0
    for document in [*documents, []]:
        index += struct.pack("<q", first)
        first += len(document)
    path.with_suffix(".idx").write_bytes(index)
    return path


def tokens_of(documents: list[Document]) -> list[list[int]]:
    return [document.tokens.tolist() for document in documents if document.tokens is not None]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [json.loads(line)["text"] for line in tiny_corpus.read_text().splitlines()]
    train_sentencepiece(texts, TokenizerSettings(vocab_size=400), folder)
    return folder


@pytest.fixture(scope="module")
def existing(tokenizer_folder: Path) -> TokenizerSettings:
    """Settings that name the model in `tokenizer_folder`."""
    return TokenizerSettings(kind="sentencepiece", path=str(tokenizer_folder / "sentencepiece.model"))


# --- reading


@pytest.mark.parametrize("dtype", CODES)
def test_documents_are_joined_sequences_for_every_dtype(tmp_path, dtype):
    path = write_megatron(tmp_path / "x.bin", [[[1, 2], [3]], [[127]], [[], [4, 5], []]], dtype)
    documents, problems = read(path)
    assert tokens_of(documents) == [[1, 2, 3], [127], [4, 5]]
    assert [document.id for document in documents] == ["x.bin:1", "x.bin:2", "x.bin:3"]
    assert not problems


def test_empty_documents_are_reported_with_their_number(tmp_path):
    path = write_megatron(tmp_path / "x.bin", [[], [[]], [[7]], [], [[9]], [[9], [9]], []])
    documents, problems = read(path, boundary_ids=(9,))
    assert [(document.id, document.record) for document in documents] == [("x.bin:3", 2)]
    assert [(problem.kind, problem.line) for problem in problems] == [("empty document", n) for n in (1, 2, 4, 5, 6, 7)]
    assert read(write_megatron(tmp_path / "none.bin", [])) == ([], [])


def test_one_boundary_id_is_removed_at_each_end_and_none_inside(tmp_path):
    path = write_megatron(tmp_path / "x.bin", [[[1, 5, 2, 6, 2]], [[2, 2, 5]], [[5, 6]], [[5, 1], [2]]])
    assert tokens_of(read(path, boundary_ids=(1, 2))[0]) == [[5, 2, 6], [2, 5], [5, 6], [5, 1]]
    assert tokens_of(read(path)[0]) == [[1, 5, 2, 6, 2], [2, 2, 5], [5, 6], [5, 1, 2]]


documents_of_sequences = st.lists(st.lists(st.lists(st.integers(0, 399), max_size=9), max_size=3), max_size=25)


@settings(max_examples=40, deadline=None)
@given(documents=documents_of_sequences, shard_bytes=st.integers(1, 90), dtype=st.sampled_from(["uint16", "int32"]))
def test_joined_slices_equal_the_whole_file(tmp_path_factory, documents, shard_bytes, dtype):
    folder = tmp_path_factory.mktemp("pieces")
    file = only_file(write_megatron(folder / "x.bin", documents, dtype))
    corpus = CorpusSettings(shard_bytes=shard_bytes)
    scan = scan_file(file, corpus)
    joined = [[token for sequence in document for token in sequence] for document in documents]
    plan = plan_shards([scan], shard_bytes)
    parts = [document for shard in plan for piece in shard for document in read_slice(piece, corpus, print)]
    assert tokens_of(parts) == [tokens for tokens in joined if tokens]
    assert scan.documents == len(parts)
    assert scan.problems.get("empty document", 0) == joined.count([])
    assert scan.id_lines.tolist() == [number for number, tokens in enumerate(joined, start=1) if tokens]
    assert scan.text_bytes == sum(document.size for document in parts) == 4 * sum(map(len, joined))


def test_positions_do_not_depend_on_the_requested_block(tmp_path):
    path = write_megatron(tmp_path / "x.bin", [[[1] * (n % 4)] * (n % 3) for n in range(50)])
    index = open_index(str(path), path.stat().st_size)
    whole = index.positions(0, 50)
    assert whole[-1] == path.stat().st_size
    for start, stop in [(0, 1), (3, 20), (48, 50), (49, 50)]:
        assert index.positions(start, stop).tolist() == whole[start : stop + 1].tolist()


# --- listing


@pytest.mark.parametrize("given", ["", "*", "**/*.bin", "*.idx", "x.bin", "x.idx"])
def test_pair_is_listed_as_one_file_for_every_way_to_name_it(tmp_path, given):
    write_megatron(tmp_path / "x.bin", [[[1]]])
    (file,) = list_files(CorpusSettings(paths=(str(tmp_path / given), str(tmp_path / "x.idx"))))
    assert (file.path, file.name) == (str(tmp_path / "x.bin"), "x.bin")
    assert file.size == sum(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize("kept", [".bin", ".idx"])
def test_incomplete_pair_is_refused_by_name_and_reported_in_a_folder(tmp_path, kept):
    path = write_megatron(tmp_path / "x.bin", [[[1]]])
    (missing,) = {".bin", ".idx"} - {kept}
    path.with_suffix(missing).unlink()
    with pytest.raises(InputError, match=rf"x\{missing} is missing"):
        list_files(CorpusSettings(paths=(str(path.with_suffix(kept)),)))
    (tmp_path / "a.txt").write_text("text")
    scans = {
        file.name: scan_file(file, CorpusSettings()) for file in list_files(CorpusSettings(paths=(str(tmp_path),)))
    }
    assert scans["a.txt"].documents == 1
    assert scans["x.bin"].problems == {"unreadable file": 1}
    assert str(path.with_suffix(missing)) in scans["x.bin"].examples[0].detail


def test_checksum_and_change_detection_cover_both_files(tmp_path):
    path = write_megatron(tmp_path / "x.bin", [[[1, 2]], [[3]]])
    before = only_file(path)
    stored = path.with_suffix(".idx").read_bytes() + path.read_bytes()
    assert scan_file(before, CorpusSettings()).checksum == hashlib.blake2b(stored, digest_size=16).hexdigest()
    os.utime(path.with_suffix(".idx"), (1, 1))
    assert only_file(path) != before


def test_pair_at_any_fsspec_url_is_read(tmp_path, memory_url):
    documents = [[[n, n + 1]] for n in range(300)]
    path = write_megatron(tmp_path / "x.bin", documents)
    with fsspec.open(f"{memory_url}/all.zip", "wb") as file, zipfile.ZipFile(file, "w") as archive:
        for part in (path, path.with_suffix(".idx")):
            archive.write(part, f"in/{part.name}")
            fsspec.filesystem("memory").pipe_file(f"{memory_url}/{part.name}", part.read_bytes())
    expected = [tokens for (tokens,) in documents]
    for url in (f"{memory_url}/x.idx", f"zip://in/*.bin::{memory_url}/all.zip"):
        assert tokens_of(read(url)[0]) == expected
        part = read_slice(FileSlice(only_file(url), 120, 200), CorpusSettings(), strict_problem)
        assert tokens_of(list(part)) == expected[120:200]
        assert scan_file(only_file(url), CorpusSettings()).documents == 300


# --- what is refused


def edited(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


@pytest.mark.parametrize(
    ("suffix", "edit"),
    [
        (".bin", lambda data: data[:-3]),
        (".bin", lambda data: data + b"\0\0"),
        (".idx", lambda data: b""),
        (".idx", lambda data: edited(data, 0, b"TNTIDX\0\0")),
        (".idx", lambda data: data[:20]),
        (".idx", lambda data: edited(data, 9, b"\2")),  # version
        (".idx", lambda data: edited(data, 17, b"\6")),  # type
        (".idx", lambda data: data[:-8]),
        (".idx", lambda data: data + b"\0\0\0"),
        (".idx", lambda data: edited(data, 18, b"\xff" * 8)),  # number of sequences
        (".idx", lambda data: edited(data, 86, b"\2")),  # last document
        (".idx", lambda data: edited(data, 78, b"\4")),
        (".idx", lambda data: edited(data, 46, b"\2")),  # pointers
        (".idx", lambda data: edited(data, 54, b"\6")),
        (".idx", lambda data: edited(data, 38, b"\xff" * 4)),  # lengths
    ],
)
def test_damaged_pair_is_refused_by_name(tmp_path, suffix, edit):
    # Lengths begin at byte 34, pointers at 46, documents at 70.
    path = write_megatron(tmp_path / "x.bin", [[[1, 2], [3, 4]], [[5]]])
    part = path.with_suffix(suffix)
    part.write_bytes(edit(part.read_bytes()))
    for action in (lambda: read(path), lambda: scan_file(only_file(path), CorpusSettings())):
        with pytest.raises(InputError, match=rf"x\{suffix}"):
            action()


@pytest.mark.parametrize(("kind", "token"), [("sentencepiece", 400), ("sentencepiece", -1), ("huggingface", 3)])
def test_token_outside_the_vocabulary_is_refused_with_file_and_document(tmp_path, existing, kind, token):
    if kind == "huggingface":  # id 3 is the one that is added for padding
        import tokenizers

        model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
        model.save(str(tmp_path / "tokenizer.json"))
        existing = TokenizerSettings(kind="huggingface", path=str(tmp_path / "tokenizer.json"))
    path = write_megatron(tmp_path / "x.bin", [[[0, 1]], [[1], [token]]], "int32")
    config = tiny_config(tmp_path, path, tokenizer=existing)
    with pytest.raises(InputError, match=rf"x\.bin: document 2 .* {token};.*tokenizer\.path"):
        build_local(config, only="chunk")
    assert not list((config.datastore / "chunks").iterdir())


def test_training_a_tokenizer_on_tokens_is_refused_with_the_setting_to_change(tmp_path, tiny_corpus):
    path = write_megatron(tmp_path / "x.bin", [[[1, 2]]])
    corpus = CorpusSettings(paths=(str(path), str(tiny_corpus)))
    with pytest.raises(InputError, match=r"tokenizer\.kind = 'bpe'.*x\.bin holds tokens.*tokenizer\.path"):
        build_local(tiny_config(tmp_path, path, corpus=corpus))
    assert not (tmp_path / "datastore").exists()


# --- to the datastore and back


@settings(max_examples=30, deadline=None)
@given(documents=documents_of_sequences, shard_bytes=st.integers(20, 400))
def test_tokens_read_from_a_datastore_equal_the_megatron_tokens(
    tmp_path_factory, tokenizer_folder, documents, shard_bytes
):
    folder = tmp_path_factory.mktemp("round")
    file = only_file(write_megatron(folder / "x.bin", documents))
    corpus = CorpusSettings(shard_bytes=shard_bytes, split=(6, 2, 2))
    tokenizer = Tokenizer.open(tokenizer_folder)
    found, counted = [], 0
    for number, pieces in enumerate(plan_shards([scan_file(file, corpus)], shard_bytes)):
        work = folder / str(number)
        counts = chunk_shard(
            work,
            pieces,
            corpus,
            ChunkSettings(chunk_length=4),
            tokenizer,
            on_problem=print,
            advance=lambda _: None,
        )
        counted += sum(count["documents"] for count in counts.values())
        for split in SPLITS:
            tokens, lengths, starts = (np.load(work / split / f"{n}.npy") for n in ("tokens", "lengths", "documents"))
            for first, stop in itertools.pairwise(starts):
                whole = to_tokens(tokens[first:stop], lengths[first:stop]).tolist()
                assert (whole[0], whole[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
                assert split_of(tokenizer.decode(whole), corpus.split) == split
                found.append(whole[1:-1])
    joined = [[token for sequence in document for token in sequence] for document in documents]
    assert sorted(found) == sorted(tokens for tokens in joined if tokens)
    assert counted == len(found)


@pytest.mark.parametrize(("dtype", "boundary"), [("uint16", ()), ("int32", (399,))])
def test_megatron_file_gives_the_same_chunks_as_its_text(
    tmp_path, tiny_corpus, tokenizer_folder, existing, dtype, boundary
):
    tokenizer = Tokenizer.open(tokenizer_folder)
    texts = [json.loads(line)["text"] for line in tiny_corpus.read_text().splitlines()]
    encoded = [[*boundary, *tokenizer.encode(text).tolist(), *boundary] for text in texts]
    made = []
    for path in (tiny_corpus, write_megatron(tmp_path / "x.bin", [[tokens] for tokens in encoded], dtype)):
        config = tiny_config(tmp_path / path.suffix[1:], path, tokenizer=existing)
        corpus = replace(config.corpus, boundary_ids=boundary, shard_bytes=2**30, split=(7, 1, 2))
        made.append(build_local(replace(config, corpus=corpus), only="chunk"))
    text, tokens = (datastore.folder / "chunks" / "00000" for datastore in made)
    for split in SPLITS:
        assert made[0].split(split).num_documents > 0
        for name in ("tokens", "lengths", "documents"):
            assert (text / split / f"{name}.npy").read_bytes() == (tokens / split / f"{name}.npy").read_bytes()
    assert made[0].manifest["splits"] == made[1].manifest["splits"]  # includes the bytes of text


def test_megatron_and_text_files_form_one_datastore_of_several_shards(tmp_path, tokenizer_folder, existing):
    tokenizer = Tokenizer.open(tokenizer_folder)
    texts = [json.loads(line)["text"] for line in write_corpus(tmp_path / "in.txt", 60).read_text().splitlines()]
    (tmp_path / "in.txt").unlink()
    folder = tmp_path / "data"
    write_megatron(folder / "b.bin", [[tokenizer.encode(text).tolist()] for text in texts[:40]])
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[40:]))
    config = tiny_config(tmp_path, folder, tokenizer=existing)
    corpus = replace(config.corpus, shard_bytes=8_000, strict=True)
    datastore = build_local(replace(config, corpus=corpus))
    pieces = [piece for shard in read_json(datastore.folder / "corpus" / "plan.json") for piece in shard]
    assert len([piece for piece in pieces if piece["file"]["name"] == "b.bin"]) > 2
    found = {}
    for split in map(datastore.split, SPLITS):
        for number, row in enumerate(split.metadata(range(split.num_documents))):
            first, stop = split.chunk_range(number)
            text = tokenizer.decode(to_tokens(split.tokens.read(first, stop), split.lengths.read(first, stop)))
            assert row["bytes"] == len(text.encode())
            found[row["id"]] = text
    expected = [f"b.bin:{n + 1}" for n in range(40)] + [f"a.jsonl:{n + 1}" for n in range(20)]
    assert found == dict(zip(expected, texts, strict=True))
    assert Datastore.open(datastore.folder).has("neighbors")
    with pytest.raises(InputError, match=r"corpus\.boundary_ids was \[\], now \[3\]"):
        build_local(replace(config, corpus=replace(corpus, boundary_ids=(3,))))
