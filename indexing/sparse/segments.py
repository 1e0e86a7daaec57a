"""Segments of the sparse index: inverted indexes over the terms of consecutive chunks and passages, written by tantivy.

    document ─► passages of 512 tokens: counts of their terms, four times those of the title ─► passages-0.idx passages-0.term …
                    └─► chunks: which terms they and the title have                         ─► chunks-0.idx   chunks-0.term …

An answer rarely repeats the subject of its paragraph, so a chunk alone is too little text to match a question. Its
passage is indexed once, instead of the terms of all chunks around it with every chunk. A term counts more often in the
title (the fields of BM25F: Robertson and Zaragoza 2009, section 3.6). Counts in a chunk are left out: it is short, and
they make it no easier to find. Equal chunks give equal bytes.
"""

import contextlib
import itertools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from indexing.progress import Advance
from indexing.sparse.terms import terms
from indexing.store.datastore import Split
from indexing.store.files import read_json, save_array, write_json
from indexing.tokenization.tokenizer import Tokenizer

# Tokens of one segment, which bounds memory: tantivy gathers a segment's lists before it writes them.
_SEGMENT_TOKENS = 2**22
_PASSAGE_TOKENS = 512
_HEAP_BYTES = 2**31  # above anything that a segment needs: a full heap would divide it
_BLOCK_CHUNKS = 4096
_REMOVALS, _WAIT = 100, 0.05  # of a folder in which a file is made at the same time; seconds between them
_TITLES = 4  # times that a term of the title is counted in a passage
TERMS = "terms"  # the field of the inverted lists
PASSAGE = "passage"  # the field of the first chunk of the passage, for searches among a few passages
TOKENIZER = "terms"
SUFFIXES = ("fast", "fieldnorm", "idx", "pos", "store", "term")
"""Files of a segment. tantivy writes `pos` and `store` even if they are empty."""
Kind = Literal["chunks", "passages"]
STORED: dict[Kind, str] = {"chunks": "basic", "passages": "freq"}
"""What the lists store with each text: nothing, or how often it has the term."""


def schema(kind: Kind) -> Any:
    """The tantivy schema: lists of the terms, and the first chunk of the passage."""
    import tantivy

    builder = tantivy.SchemaBuilder()
    builder.add_text_field(TERMS, tokenizer_name=TOKENIZER, index_option=STORED[kind])
    builder.add_unsigned_field(PASSAGE, indexed=True)
    return builder.build()


def with_tokenizer(index: Any) -> Any:
    """The index, which cuts texts at blanks: the terms are already separate."""
    import tantivy

    index.register_tokenizer(TOKENIZER, tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.whitespace()).build())
    return index


def write_segments(work: Path, split: Split, rows: tuple[int, int], tokenizer: Tokenizer, advance: Advance) -> int:
    """Write the segments of the chunks `rows` of a split, whole documents.

    Next to the segments are `passages.npy`, the first chunk of each passage and the stop of the last one [passages + 1]
    int64, `segments.json`, the number of chunks and of passages in each segment, and tantivy's schemas, `chunks.json`
    and `passages.json`.

    Args:
        work: folder to write to.
        split: split of the chunks.
        rows: first and stop of the chunk ids.
        tokenizer: tokenizer of the chunks.
        advance: called with numbers of finished chunks.

    Returns:
        number of chunks.
    """
    borders = _passages(split, rows)
    save_array(work / "passages.npy", borders)
    sizes: dict[Kind, list[int]] = {"chunks": [], "passages": []}
    for segment, part in enumerate(_parts(borders, _SEGMENT_TOKENS // split.chunk_length)):
        with _segment(work, "chunks", segment) as add_chunk, _segment(work, "passages", segment) as add_passage:
            for block in _parts(part, _BLOCK_CHUNKS):
                _add(block, split, tokenizer, add_chunk, add_passage)
                advance(int(block[-1] - block[0]))
        sizes["chunks"].append(int(part[-1] - part[0]))
        sizes["passages"].append(len(part) - 1)
    write_json(work / "segments.json", sizes)
    return sum(sizes["chunks"])


def _passages(split: Split, rows: tuple[int, int]) -> np.ndarray:
    """The borders of passages [passages + 1] int64. Documents are cut every 512 tokens."""
    if rows[0] == rows[1]:
        return np.array([rows[0]], dtype=np.int64)
    first, last = split.documents_of(np.array([rows[0], rows[1] - 1]))[0].tolist()
    size = max(1, _PASSAGE_TOKENS // split.chunk_length)
    ranges = split.chunk_ranges(np.arange(first, last + 1, dtype=np.int64))
    return np.concatenate([*(np.arange(start, stop, size) for start, stop in ranges.tolist()), rows[1:]])


def _parts(borders: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Consecutive parts of about `size` chunks, each with its borders of passages."""
    first = 0
    while first + 1 < len(borders):
        stop = max(first + 1, int(np.searchsorted(borders, borders[first] + size, side="right")) - 1)
        yield borders[first : stop + 1]
        first = stop


def _add(
    borders: np.ndarray,
    split: Split,
    tokenizer: Tokenizer,
    add_chunk: Callable[[str, int], None],
    add_passage: Callable[[str, int], None],
) -> None:
    """Add some passages and their chunks: their terms as often as they count, separated by blanks."""
    start, stop = int(borders[0]), int(borders[-1])
    tokens, lengths = split.tokens.read(start, stop), split.lengths.read(start, stop)
    rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    texts = tokenizer.decode_batch(rows)
    local = (borders - start).tolist()
    ranges = list(itertools.pairwise(local))
    # A word that the border of two chunks cuts is whole only in the passage.
    passages = tokenizer.decode_batch([np.concatenate(rows[first:last]) for first, last in ranges])
    documents = split.documents_of(borders[:-1])[0].tolist()
    different = sorted(set(documents))
    titles = {
        document: " ".join(terms(str(row.get("title") or "")))
        for document, row in zip(different, split.metadata(different), strict=True)
    }
    for (first, last), passage, document in zip(ranges, passages, documents, strict=True):
        title, first_chunk = titles[document], start + first
        add_passage(" ".join([*terms(passage), *[title] * _TITLES]), first_chunk)
        for text in texts[first:last]:
            add_chunk(" ".join([*terms(text), title]), first_chunk)


@contextlib.contextmanager
def _segment(work: Path, kind: Kind, number: int) -> Iterator[Callable[[str, int], None]]:
    """Write one segment: call the result with the terms of each chunk or passage, and the first chunk of its
    passage."""
    import tantivy

    with temporary_folder(work) as folder, _disk_errors(folder):
        index = with_tokenizer(tantivy.Index(schema(kind), path=str(folder), reuse=False))
        writer = index.writer(heap_size=_HEAP_BYTES, num_threads=1)

        def add(counted: str, passage: int) -> None:
            document = tantivy.Document()
            document.add_text(TERMS, counted)
            document.add_unsigned(PASSAGE, passage)
            writer.add_document(document)

        yield add
        writer.commit()
        writer.wait_merging_threads()
        meta: dict[str, Any] = read_json(folder / "meta.json")
        (segment,) = meta["segments"]
        for suffix in SUFFIXES:
            os.rename(folder / f"{segment['segment_id'].replace('-', '')}.{suffix}", work / f"{kind}-{number}.{suffix}")
        write_json(work / f"{kind}.json", {key: meta[key] for key in ("index_settings", "schema")})


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Raise OSError where tantivy raises ValueError because of the disk."""
    try:
        yield
    except ValueError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error


@contextlib.contextmanager
def temporary_folder(inside: Path | None = None) -> Iterator[Path]:
    """A folder for an index of tantivy, removed at the end. For a moment, threads of tantivy still make lock files in
    it."""
    folder = Path(tempfile.mkdtemp(prefix="retro-sparse-", dir=inside))
    try:
        yield folder
    finally:
        for last_time in (*[False] * _REMOVALS, True):
            shutil.rmtree(folder, ignore_errors=not last_time)
            if not folder.exists():
                break
            time.sleep(_WAIT)
