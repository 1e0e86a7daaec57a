"""Large documents: memory holds a few blocks, and every result is that of the text read as a whole."""

import gzip
import io
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexing.corpus import documents as documents_module
from indexing.corpus import readers, text_bytes
from indexing.corpus.chunks import ChunkSettings, chunk_shard
from indexing.corpus.documents import CorpusSettings
from indexing.corpus.scan import plan_shards, read_slice, scan_file, split_of, split_of_document
from indexing.store.errors import InputError
from indexing.tokenization import tokenizer as tokenizer_module
from indexing.tokenization.settings import TokenizerSettings
from indexing.tokenization.tokenizer import Tokenizer
from indexing.tokenization.training import train_sentencepiece
from tests.conftest import build_local, contents, tiny_config
from tests.indexing.corpus.reading import only_file, read

SENTENCE = "The index of a chunk,\tin the store; 检索模型的训练数据，向量分片。 x = 12 🙂 e\u0301\n"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function that makes every text of more than 3,000 bytes a large one."""

    def shrink() -> None:
        monkeypatch.setattr(readers, "_LARGE_BYTES", 3000)
        monkeypatch.setattr(text_bytes, "BLOCK_BYTES", 700)
        monkeypatch.setattr(documents_module, "TEXT_BLOCK", 1024)
        monkeypatch.setattr(tokenizer_module, "PIECE", 500)
        monkeypatch.setattr(tokenizer_module, "_LONG", 1000)

    return shrink


def write_files(folder: Path) -> Path:
    folder.mkdir()
    text = (SENTENCE * 150).encode()
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbf" + text)
    (folder / "b.md").write_bytes(text[:5000] + b"\xff\xe6 \xe6\xa3" + text[5000:9000] + b"\x00\xf0\x9f\x99")
    (folder / "c.txt.gz").write_bytes(gzip.compress(text[300:]))
    (folder / "cut.txt.gz").write_bytes(gzip.compress(text[200:])[:-20])
    (folder / "short.txt").write_bytes(b"short \xff")
    (folder / "blank.txt").write_bytes(b" \n" * 4000)
    (folder / "latin.txt").write_bytes("äöüß".encode("latin1") * 2000)
    for number in range(20):
        (folder / f"{number}.txt").write_bytes(text[20 * number : 4000 + 300 * number])
    return folder


def test_datastores_of_large_documents_hold_the_bytes_of_documents_read_whole(
    tmp_path: Path, small_blocks: Callable[[], None]
) -> None:
    corpus = write_files(tmp_path / "files")
    config = tiny_config(tmp_path / "whole", corpus)
    config = replace(config, corpus=replace(config.corpus, split=(2, 1, 1)))
    whole = contents(build_local(config, only="chunk").folder)
    small_blocks()
    in_blocks = contents(build_local(replace(config, datastore=tmp_path / "blocks"), only="chunk").folder)
    assert in_blocks == whole
    documents = read(corpus / "a.txt")[0]
    assert documents[0].large is not None


@pytest.mark.parametrize("name", ["a.txt", "b.md", "c.txt.gz", "cut.txt.gz", "short.txt", "blank.txt", "latin.txt"])
def test_a_large_file_has_the_text_the_problems_and_the_split_of_one_read_whole(
    tmp_path: Path, small_blocks: Callable[[], None], name: str
) -> None:
    path = write_files(tmp_path / "files") / name
    expected, problems = read(path)
    small_blocks()
    documents, found = read(path)
    assert found == problems
    assert [replace(each, text="".join(each.blocks()), large=None) for each in documents] == expected
    for document, whole in zip(documents, expected, strict=True):
        assert document.size == whole.size
        assert split_of_document(document, (1, 1, 1)) == split_of(whole.text, (1, 1, 1))


@given(data=st.lists(st.sampled_from([*range(0x20, 0x30), 0x80, 0xBF, 0xC3, 0xE6, 0xA3, 0xF0, 0x9F, 0xED, 0xFF])))
def test_blocks_of_any_bytes_are_decoded_as_the_whole(data: list[int]) -> None:
    content = bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_bytes, "BLOCK_BYTES", 5)
        blocks = list(text_bytes.text_blocks(io.BytesIO(content)))
    assert "".join(block.decode(errors="replace") for block in blocks) == content.decode(errors="replace")


def test_a_large_file_that_changes_between_two_readings_is_refused(
    tmp_path: Path, small_blocks: Callable[[], None]
) -> None:
    small_blocks()
    path = write_files(tmp_path / "files") / "a.txt"
    (document,) = read(path)[0]
    path.write_text(SENTENCE * 100)
    with pytest.raises(InputError, match=r"a\.txt has changed while it was read"):
        list(document.blocks())


def test_memory_does_not_grow_with_the_document(tmp_path: Path, small_blocks: Callable[[], None]) -> None:
    small_blocks()
    train_sentencepiece([SENTENCE], TokenizerSettings(vocab_size=400), tmp_path / "tokenizer")
    corpus, most = CorpusSettings(split=(1, 0, 0)), list[int]()
    for size in (1, 20):
        path = tmp_path / f"{size}.txt"
        path.write_text(SENTENCE * 80 * size)
        (slices,) = plan_shards([scan_file(only_file(path), corpus)], 2**20)
        tracemalloc.start()
        chunk_shard(
            tmp_path / f"work-{size}", slices, corpus, ChunkSettings(chunk_length=16),
            Tokenizer.open(tmp_path / "tokenizer"),
            on_problem=print, advance=lambda count: None,
        )  # fmt: skip
        scan_file(only_file(path), corpus)
        most.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert path.stat().st_size > 150_000
    assert most[1] < most[0] + 30_000


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_json_line_above_the_limit_is_left_out_and_reported_by_line(tmp_path: Path, suffix: str) -> None:
    rows = ['{"text": "first"}', '{"text": "' + "x" * 5000 + '"}', '{"text": "third"}', '{"text": "' + "y" * 300 + '"}']
    data = "\n".join(rows).encode()
    path = tmp_path / f"d.jsonl{suffix}"
    path.write_bytes(gzip.compress(data) if suffix else data)
    documents, problems = read(path, max_line_bytes=100)
    assert [(each.record, each.text) for each in documents] == [(0, "first"), (2, "third")]
    assert [(each.kind, each.line) for each in problems] == [("long line", 2), ("long line", 4)]
    assert "5,013 bytes, more than corpus.max_line_bytes = 100" in problems[0].detail
    scan = scan_file(only_file(path), CorpusSettings(max_line_bytes=100, shard_bytes=1))
    again = [each for part in scan.slices for each in read_slice(part, CorpusSettings(max_line_bytes=100), print)]
    assert again == documents
    with pytest.raises(InputError, match=rf"d\.jsonl{suffix}:2: long line.*corpus\.max_line_bytes"):
        scan_file(only_file(path), CorpusSettings(max_line_bytes=100, strict=True))


def test_a_line_at_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "ab"}\n{"text": "cd"}')
    assert [each.text for each in read(path, max_line_bytes=14)[0]] == ["ab", "cd"]
    assert [each.line for each in read(path, max_line_bytes=13)[1]] == [1, 2]


def test_other_limits_of_a_line_are_refused_for_a_finished_datastore(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("".join(f'{{"text": "{SENTENCE[:20]} {n}"}}\n' for n in range(40)))
    config = tiny_config(tmp_path, tmp_path / "d.jsonl")
    build_local(config, only="chunk")
    with pytest.raises(InputError, match=r"corpus\.max_line_bytes was 67108864, now 1000"):
        build_local(replace(config, corpus=replace(config.corpus, max_line_bytes=1000)), only="chunk")
