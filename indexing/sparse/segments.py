"""Segments of the sparse index: an inverted index over the terms of consecutive chunks, written by tantivy.

    chunk: its own terms twice, terms of the adjacent chunks once, terms of the title four times ─► counts ─► 0.idx 0.term …
                                                                                      the next chunks ─► 1.idx 1.term …

A term counts twice as much in the title as in the chunk, and half as much in the chunks before and after, because an answer rarely
repeats the subject of its paragraph (the fields of BM25F: Robertson and Zaragoza 2009, section 3.6). The weights are applied when
the terms are counted, so a search needs one list for each term. Equal chunks give equal bytes.
"""

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from indexing.progress import Advance
from indexing.sparse.terms import terms
from indexing.store.datastore import Split
from indexing.store.files import read_json, write_json
from indexing.tokenization.tokenizer import Tokenizer

# Tokens of one segment, which bounds memory: tantivy gathers a segment's lists before it writes them.
_SEGMENT_TOKENS = 2**22
_HEAP_BYTES = 2**31  # above anything that a segment needs: a full heap would divide it
_BLOCK_CHUNKS = 4096
_REMOVALS, _WAIT = 100, 0.05  # of a folder in which a file is made at the same time; seconds between them
_OWN, _ADJACENT, _TITLE = 2, 1, 4  # times that a term is counted
TERMS = "terms"  # the field of the inverted lists
CHUNK = "chunk"  # the field of chunk ids, for searches among a few chunks
TOKENIZER = "terms"
SUFFIXES = ("fast", "fieldnorm", "idx", "pos", "store", "term")
"""Files of a segment. tantivy writes `pos` and `store` even if they are empty."""


def schema() -> Any:
    """The tantivy schema: lists of the terms with their counts, and the id of each chunk."""
    import tantivy

    builder = tantivy.SchemaBuilder()
    builder.add_text_field(TERMS, tokenizer_name=TOKENIZER, index_option="freq")
    builder.add_unsigned_field(CHUNK, indexed=True)
    return builder.build()


def with_tokenizer(index: Any) -> Any:
    """The index, which cuts texts at blanks: the terms are already separate."""
    import tantivy

    index.register_tokenizer(TOKENIZER, tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.whitespace()).build())
    return index


def write_segments(work: Path, split: Split, rows: tuple[int, int], tokenizer: Tokenizer, advance: Advance) -> int:
    """Write the segments of the chunks `rows` of a split, whole documents, and `work/segments.json`.

    Args:
        work: folder to write to.
        split: split of the chunks.
        rows: first and stop of the chunk ids.
        tokenizer: tokenizer of the chunks.
        advance: called with numbers of finished chunks.

    Returns:
        number of chunks.
    """
    size = max(1, _SEGMENT_TOKENS // split.chunk_length)
    starts = range(rows[0], rows[1], size)
    meta: dict[str, Any] = {}
    for number, start in enumerate(starts):
        meta = _write_segment(work, number, split, (start, min(start + size, rows[1])), tokenizer, advance)
    sizes = [min(start + size, rows[1]) - start for start in starts]
    settings = {key: meta[key] for key in ("index_settings", "schema") if meta}
    write_json(work / "segments.json", {"chunks": sizes} | settings)
    return sum(sizes)


def _write_segment(
    work: Path, number: int, split: Split, rows: tuple[int, int], tokenizer: Tokenizer, advance: Advance
) -> dict[str, Any]:
    """Write one segment, and return tantivy's description of it."""
    import tantivy

    with temporary_folder(work) as folder, _disk_errors(folder):
        index = with_tokenizer(tantivy.Index(schema(), path=str(folder), reuse=False))
        writer = index.writer(heap_size=_HEAP_BYTES, num_threads=1)
        for block in _blocks(split, rows, tokenizer):
            for chunk_id, counted in block:
                document = tantivy.Document()
                document.add_text(TERMS, counted)
                document.add_unsigned(CHUNK, chunk_id)
                writer.add_document(document)
            advance(len(block))
        writer.commit()
        writer.wait_merging_threads()
        meta: dict[str, Any] = read_json(folder / "meta.json")
        (segment,) = meta["segments"]
        for suffix in SUFFIXES:
            os.rename(folder / f"{segment['segment_id'].replace('-', '')}.{suffix}", work / f"{number}.{suffix}")
    return meta


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
    """A folder for an index of tantivy, removed at the end. For a moment, threads of tantivy still make lock files in it."""
    folder = Path(tempfile.mkdtemp(prefix="retro-sparse-", dir=inside))
    try:
        yield folder
    finally:
        for last_time in (*[False] * _REMOVALS, True):
            shutil.rmtree(folder, ignore_errors=not last_time)
            if not folder.exists():
                break
            time.sleep(_WAIT)


def _blocks(split: Split, rows: tuple[int, int], tokenizer: Tokenizer) -> Iterator[list[tuple[int, str]]]:
    """Chunk ids with their terms as often as they count, separated by blanks."""
    for start in range(*rows, _BLOCK_CHUNKS):
        stop = min(start + _BLOCK_CHUNKS, rows[1])
        first, last = max(0, start - 1), min(split.num_chunks, stop + 1)  # with the adjacent chunks
        tokens, lengths = split.tokens.read(first, last), split.lengths.read(first, last)
        texts = tokenizer.decode_batch([row[:length] for row, length in zip(tokens, lengths, strict=True)])
        found = [" ".join(terms(text)) for text in texts]
        documents = split.documents_of(np.arange(first, last, dtype=np.int64))[0].tolist()
        numbers = sorted(set(documents))
        of_title = {
            number: " ".join(terms(str(row.get("title") or "")))
            for number, row in zip(numbers, split.metadata(numbers), strict=True)
        }
        block = []
        for place in range(start - first, stop - first):
            sides = [side for side in (place - 1, place + 1) if 0 <= side < len(found)]
            adjacent = [found[side] for side in sides if documents[side] == documents[place]]
            title = of_title[documents[place]]
            block.append((first + place, " ".join([found[place]] * _OWN + adjacent * _ADJACENT + [title] * _TITLE)))
        yield block
