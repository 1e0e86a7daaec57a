"""Scans and shards: joined slices equal the whole file, every problem is counted, and a hash decides the split of a document."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from indexing.corpus.documents import CorpusFile, CorpusProblem, CorpusSettings, Document
from indexing.corpus.readers import read_documents
from indexing.corpus.scan import (
    FileScan,
    FileSlice,
    find_duplicates,
    list_files,
    plan_shards,
    read_slice,
    scan_file,
    shard_size,
    split_of,
    strict_problem,
)
from indexing.store.datastore import SPLITS
from tests.indexing.corpus.reading import compress, lines, only_file, write

SETTINGS = CorpusSettings()


records = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=30).map(lambda text: {"text": text}),
        st.sampled_from([b"", b"{", b'{"text": "\xff"}', {"text": "same", "id": "same"}]),
    ),
    max_size=40,
)


@hypothesis_settings(max_examples=40, deadline=None)
@given(rows=records, shard_bytes=st.integers(1, 60), suffix=st.sampled_from(["", ".gz", ".zst"]), bom=st.booleans())
def test_joined_slices_equal_the_whole_file(tmp_path_factory, rows, shard_bytes, suffix, bom):
    data = compress((b"\xef\xbb\xbf" if bom else b"") + lines(*rows), suffix)
    file = only_file(write(tmp_path_factory.mktemp("pieces") / f"d.jsonl{suffix}", data))
    seen: list[Document] = []
    scan = scan_file(file, CorpusSettings(shard_bytes=shard_bytes), seen.append)
    problems: list[CorpusProblem] = []
    whole = list(read_documents(file, SETTINGS, on_problem=problems.append))
    assert seen == whole
    assert scan.documents == len(whole) == len(scan.id_hashes)
    assert scan.id_lines.tolist() == [document.record + 1 for document in whole]
    assert scan.text_bytes == sum(len(document.text.encode()) for document in whole)
    assert sum(scan.problems.values()) == len(problems)
    assert scan.examples == problems
    parts = []
    for cut in scan.slices:
        part = list(read_slice(cut, SETTINGS, problems.append))
        sizes = [len(document.text.encode()) for document in part]
        assert sum(sizes) == cut.text_bytes
        assert sum(sizes[:-1]) < shard_bytes  # a slice ends with the document that fills it
        assert part == list(read_documents(file, SETTINGS, start=cut.start, stop=cut.stop, on_problem=problems.append))
        parts += part
    assert parts == whole


def test_slice_of_parquet_equals_the_same_rows_of_the_whole_file(tmp_path):
    pq.write_table(pa.table({"text": [f"text {i}" for i in range(1000)]}), tmp_path / "d.parquet", row_group_size=70)
    file = only_file(tmp_path / "d.parquet")
    for start, stop in [(0, 0), (0, 70), (69, 71), (140, 600), (999, None), (1000, None), (5000, 6000)]:
        documents = list(read_documents(file, SETTINGS, start=start, stop=stop, on_problem=strict_problem))
        assert [document.text for document in documents] == [f"text {i}" for i in range(1000)][start:stop]
        assert [document.record for document in documents] == list(range(1000))[start:stop]


def test_checksum_covers_the_stored_bytes(tmp_path):
    pq.write_table(pa.table({"text": ["x"] * 100}), tmp_path / "c.parquet")
    write(tmp_path / "a.txt", b"text")
    write(
        tmp_path / "b.jsonl.zst", zstandard.compress(lines({"text": "First."}, {"text": "第二篇文章。"})) + b"garbage"
    )
    for file in list_files(CorpusSettings(paths=(str(tmp_path),))):
        expected = hashlib.blake2b(Path(file.path).read_bytes(), digest_size=16).hexdigest()
        assert scan_file(file, SETTINGS).checksum == expected


def test_all_problems_are_counted_and_the_first_ones_are_kept(tmp_path):
    scan = scan_file(only_file(write(tmp_path / "d.jsonl", b"{\n" * 250)), SETTINGS)
    assert scan.problems == {"broken JSON": 250}
    assert [problem.line for problem in scan.examples] == list(range(1, 101))


def scan_of(slices: list[FileSlice]) -> FileScan:
    nothing = np.zeros(0, dtype=np.uint64)
    return FileScan(0, 0, {}, [], slices, "", nothing, nothing.astype(np.int64))


@pytest.mark.parametrize(
    ("text_bytes", "size"),
    [(0, 4 << 20), (100 << 20, 4 << 20), (1 << 30, 16 << 20), (4 << 30, 64 << 20), (1 << 42, 64 << 20)],
)
def test_a_corpus_has_64_shards_unless_they_would_be_small_or_large(text_bytes: int, size: int) -> None:
    assert shard_size(CorpusSettings(), text_bytes) == size
    assert shard_size(CorpusSettings(shard_bytes=1000), text_bytes) == 1000


@given(
    sizes=st.lists(
        st.lists(st.one_of(st.integers(1, 50), st.integers(50, 150), st.integers(150, 900)), max_size=8), max_size=8
    )
)
def test_shards_contain_every_slice_once_in_order_and_have_about_the_requested_size(sizes):
    files = [CorpusFile(f"/{i}", str(i), 0) for i in range(len(sizes))]
    slices = [
        [FileSlice(file, 10 * k, 10 * k + 10, k, size) for k, size in enumerate(row)]
        for file, row in zip(files, sizes, strict=True)
    ]
    shards = plan_shards(list(map(scan_of, slices)), 100)
    assert [piece for shard in shards for piece in shard] == [piece for row in slices for piece in row]
    for number, shard in enumerate(shards):
        parts = [piece.text_bytes for piece in shard]
        assert parts
        assert sum(parts) <= 150 or len(parts) == 1 or max(parts) > 100
        assert sum(parts[:-1]) < 100
        if number + 1 < len(shards) and max(parts) <= 100:
            assert sum(parts) >= 50 or shards[number + 1][0].text_bytes > 100


def test_duplicate_ids_are_found_across_files_and_name_the_first_occurrence(tmp_path):
    rows = [{"id": name, "text": name} for name in ("a", "b", "a", "c")]
    write(tmp_path / "1.jsonl", lines(*rows))
    write(tmp_path / "2.jsonl", lines({"text": "no id"}, b"", {"id": "c", "text": "other"}, {"id": "a", "text": "x"}))
    write(tmp_path / "3.jsonl", b"")
    files = list_files(CorpusSettings(paths=(str(tmp_path),)))
    problems = find_duplicates(files, [scan_file(file, SETTINGS) for file in files])
    one, two = str(tmp_path / "1.jsonl"), str(tmp_path / "2.jsonl")
    assert [(problem.kind, problem.file, problem.line) for problem in problems] == [
        ("duplicate id", one, 3), ("duplicate id", two, 3), ("duplicate id", two, 4),
    ]  # fmt: skip
    assert [problem.detail.split("occurs at ")[1] for problem in problems] == [f"{one}:1", f"{one}:4", f"{one}:1"]
    assert find_duplicates([], []) == []
    assert find_duplicates(files[2:], [scan_file(files[2], SETTINGS)]) == []


TEXTS = [f"document {i}" for i in range(20_000)]


def members(weights: tuple[int, int, int], split: str) -> set[str]:
    return {text for text in TEXTS if split_of(text, weights) == split}


@pytest.mark.parametrize("weights", [(950, 30, 20), (8, 1, 1), (1, 0, 0), (3, 0, 4), (1, 10**9, 10**9)])
def test_split_sizes_follow_the_weights(weights):
    for split, weight in zip(SPLITS, weights, strict=True):
        share = len(members(weights, split)) / len(TEXTS)
        expected = weight / sum(weights)
        assert abs(share - expected) <= 4 * (expected * (1 - expected) / len(TEXTS)) ** 0.5


def test_held_out_documents_are_chosen_by_thousandths_of_the_hash():
    def thousandth(text: str) -> int:
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % 1000

    assert members((980, 20, 0), "valid") == {text for text in TEXTS if thousandth(text) < 20}
    assert members((970, 20, 10), "test") == {text for text in TEXTS if thousandth(text) >= 990}


def test_larger_held_out_weights_take_documents_only_from_train():
    valid, test = members((980, 20, 0), "valid"), members((970, 20, 10), "test")
    assert members((970, 20, 10), "valid") == valid
    assert members((95, 3, 2), "valid") > valid
    assert members((95, 3, 2), "test") > test
    assert members((97, 2, 1), "test") == test
    assert not members((9, 1, 0), "test")


@pytest.mark.parametrize("shard_bytes", [1, 200, 10**6])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_deleted_documents_are_in_no_slice_and_counted_nowhere(tmp_path: Path, shard_bytes: int, step: int) -> None:
    lines = [json.dumps({"id": f"d{number}", "text": "word " * (number % 7 + 1)}) for number in range(40)]
    file = only_file(write(tmp_path / "a.jsonl", "\n".join(lines).encode()))
    settings, deleted = CorpusSettings(shard_bytes=shard_bytes), {f"d{number}" for number in range(0, 40, step)}
    scan = scan_file(file, settings, deleted=deleted)
    kept = [document for document in read_documents(file, settings, on_problem=print) if document.id not in deleted]
    plan = plan_shards([scan], shard_bytes)
    read = [document for shard in plan for each in shard for document in read_slice(each, settings, print)]
    assert read == kept
    assert (scan.documents, scan.left_out) == (len(kept), len(deleted))
    assert scan.text_bytes == sum(document.size for document in kept) == sum(part.text_bytes for part in scan.slices)
