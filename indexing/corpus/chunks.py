"""Cut documents into chunks: one shard of the corpus becomes token arrays.

    slices of files → documents → tokens ([bos] text [eos]) → rows of m tokens, the last row of a document padded

A hash of its text assigns each document to `train`, `valid` or `test`. A chunk never spans two documents. Documents
stored as tokens keep their tokens. They are decoded for the hash and to count bytes.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from indexing.corpus.documents import NUMBER_COLUMNS, TEXT_COLUMNS, CorpusFile, CorpusProblem, CorpusSettings, Document
from indexing.corpus.scan import FileSlice, read_slice, split_of, split_of_document
from indexing.machine import allowed_threads, map_ahead
from indexing.progress import Advance
from indexing.store.datastore import SPLITS
from indexing.store.errors import InputError
from indexing.store.files import NpyWriter
from indexing.store.settings import settings
from indexing.tokenization.tokenizer import Tokenizer

# Batches that are tokenized at a time: SentencePiece works on one while Python converts the ids of the other, holding
# the GIL. Text per batch and thread: small, so that all threads finish at about the same time.
_AT_A_TIME = 2
_BATCH_BYTES = 2**19


@settings
class ChunkSettings:
    """How documents are cut into chunks."""

    key: ClassVar = "chunks"

    chunk_length: Annotated[int, Field(ge=2, le=65535)] = 32
    """m, tokens per chunk (paper: 64). Shorter chunks gain more from copying, and are more vectors
    (docs/results/which-neighbors.md)."""


def to_chunks(documents: Sequence[np.ndarray], chunk_length: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut non-empty documents of tokens [t] into chunks [n, m], the last of each padded, and their lengths [n]
    uint16."""
    tokens = np.array([len(document) for document in documents])
    counts = -(-tokens // chunk_length)
    stops = counts.cumsum()
    chunks = np.full(stops[-1] * chunk_length, pad_id, dtype=documents[0].dtype)
    for document, start in zip(documents, ((stops - counts) * chunk_length).tolist(), strict=True):
        chunks[start : start + len(document)] = document
    lengths = np.full(stops[-1], chunk_length, dtype=np.uint16)
    lengths[stops - 1] = tokens - (counts - 1) * chunk_length
    return chunks.reshape(-1, chunk_length), lengths


class _SplitWriter:
    """Writes the four files of one split of one shard, batch by batch; the exit stack `files` closes them."""

    def __init__(
        self,
        folder: Path,
        settings: ChunkSettings,
        tokenizer: Tokenizer,
        metadata_keys: Iterable[str],
        files: contextlib.ExitStack,
    ) -> None:
        import pyarrow
        import pyarrow.parquet

        folder.mkdir(parents=True)
        self.chunk_length, self.pad_id = settings.chunk_length, tokenizer.pad_id
        self.tokens = files.enter_context(NpyWriter(folder / "tokens.npy", tokenizer.dtype, (settings.chunk_length,)))
        self.lengths = files.enter_context(NpyWriter(folder / "lengths.npy", np.uint16))
        self.offsets = files.enter_context(NpyWriter(folder / "documents.npy", np.int64))
        self.offsets.append(np.zeros(1, np.int64))
        self.metadata_keys = list(metadata_keys)
        text_fields = [(name, pyarrow.string()) for name in (*TEXT_COLUMNS, *self.metadata_keys)]
        number_fields = [(name, pyarrow.int64()) for name in NUMBER_COLUMNS]
        self.schema = pyarrow.schema(text_fields + number_fields)
        self.documents = files.enter_context(pyarrow.parquet.ParquetWriter(folder / "documents.parquet", self.schema))
        self.rows: list[dict[str, Any]] = []
        self.counts = {"documents": 0, "chunks": 0, "tokens": 0, "bytes": 0}

    def append(self, documents: Sequence[tuple[Document, np.ndarray]], file: str) -> None:
        """Write documents of one file and their tokens, including begin and end."""
        if not documents:
            return
        chunks, lengths = to_chunks([tokens for _, tokens in documents], self.chunk_length, self.pad_id)
        self.tokens.append(chunks)
        self.lengths.append(lengths)
        self._add_rows(((document, len(document.text.encode()), len(tokens)) for document, tokens in documents), file)

    def append_large(self, document: Document, parts: Iterable[np.ndarray], file: str) -> None:
        """Write a document whose tokens, including begin and end, come in parts."""
        rest, count = np.zeros(0, dtype=self.tokens.dtype), 0
        for part in parts:
            count += len(part)
            rest = np.concatenate([rest, part])
            whole = len(rest) // self.chunk_length * self.chunk_length
            self.tokens.append(rest[:whole].reshape(-1, self.chunk_length))
            self.lengths.append(np.full(whole // self.chunk_length, self.chunk_length, dtype=np.uint16))
            rest = rest[whole:]
        if len(rest):
            chunks, lengths = to_chunks([rest], self.chunk_length, self.pad_id)
            self.tokens.append(chunks)
            self.lengths.append(lengths)
        self._add_rows([(document, document.size, count)], file)

    def _add_rows(self, documents: Iterable[tuple[Document, int, int]], file: str) -> None:
        """Add rows of `documents.parquet` and offsets for documents with their bytes and tokens, whose chunks are
        written."""
        first = len(self.rows)
        for document, size, tokens in documents:
            sizes = {"bytes": size, "tokens": tokens, "chunks": -(-tokens // self.chunk_length)}
            metadata = {key: document.metadata.get(key) for key in self.metadata_keys}
            self.rows.append({"id": document.id, "file": file} | sizes | metadata)
        added = self.rows[first:]
        self.offsets.append(self.counts["chunks"] + np.cumsum([row["chunks"] for row in added], dtype=np.int64))
        self.counts["documents"] += len(added)
        for key in ("chunks", "tokens", "bytes"):
            self.counts[key] += sum(row[key] for row in added)
        if len(self.rows) >= 10_000:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows of `documents.parquet`."""
        import pyarrow

        self.documents.write_table(pyarrow.Table.from_pylist(self.rows, schema=self.schema))
        self.rows.clear()


def batches(documents: Iterable[Document], batch_bytes: int = 4 * 2**20) -> Iterator[list[Document]]:
    """Group documents into lists with a few megabytes of text. A large document is alone."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        if document.large is not None:
            if batch:
                yield batch
            yield [document]
            batch, size = [], 0
            continue
        batch.append(document)
        size += document.size
        if size >= batch_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def with_text(batch: list[Document], path: str, tokenizer: Tokenizer) -> list[Document]:
    """Add the text of documents that are stored as tokens. All documents are from one file.

    Raises:
        InputError: a stored token is not in this tokenizer's vocabulary.
    """
    stored = [document.tokens for document in batch if document.tokens is not None]
    if not stored:
        return batch
    for document, tokens in zip(batch, stored, strict=True):
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= tokenizer.num_model_tokens:
            raise InputError(
                f"{path}: document {document.record + 1} holds the token id {low if low < 0 else high}; the tokenizer's are 0 "
                f"to {tokenizer.num_model_tokens - 1}. Set tokenizer.path to the tokenizer that made the file. If ids were added "
                "to begin or end documents, list them in corpus.boundary_ids."
            )
    texts = tokenizer.decode_batch(stored)
    return [replace(document, text=text) for document, text in zip(batch, texts, strict=True)]


@dataclass(frozen=True)
class _Batch:
    """Some documents of one file, and their bytes of text, including documents that were left out."""

    file: CorpusFile
    documents: list[Document]
    size: int


def _read(
    slices: list[FileSlice],
    corpus: CorpusSettings,
    left_out: set[int],
    on_problem: Callable[[CorpusProblem], None],
    batch_bytes: int,
) -> Iterator[_Batch]:
    """Read the documents of a shard in batches, without the documents numbered in `left_out` (counted from 0)."""
    position = itertools.count()
    for file_slice in slices:
        for batch in batches(read_slice(file_slice, corpus, on_problem=on_problem), batch_bytes):
            documents = [document for document in batch if next(position) not in left_out]
            yield _Batch(file_slice.file, documents, sum(document.size for document in batch))


def _counted(blocks: Iterable[str], advance: Advance) -> Iterator[str]:
    """Yield the blocks of a text, and call `advance` with the bytes of each."""
    for block in blocks:
        yield block
        advance(len(block.encode()))


def _tokenized(batch: _Batch, tokenizer: Tokenizer) -> tuple[_Batch, list[np.ndarray]]:
    """A batch with text, and the tokens of its documents: encodes text, or decodes stored tokens. None of a large
    document."""
    if any(document.large is not None for document in batch.documents):
        return batch, []
    documents = with_text(batch.documents, batch.file.path, tokenizer)
    tokens = [document.tokens.astype(tokenizer.dtype) for document in documents if document.tokens is not None]
    tokens = tokens or tokenizer.encode_batch([document.text for document in documents])
    return replace(batch, documents=documents), tokens


def threads_of_a_batch() -> int:
    """Threads that tokenize a batch of text, of those of this process."""
    return max(1, allowed_threads() // _AT_A_TIME)


def chunk_shard(
    work: Path,
    slices: list[FileSlice],
    corpus: CorpusSettings,
    settings: ChunkSettings,
    tokenizer: Tokenizer,
    *,
    on_problem: Callable[[CorpusProblem], None],
    advance: Advance,
    removed: np.ndarray | None = None,
) -> dict[str, dict[str, int]]:
    """Write the chunks of one shard into the folder `work`, with a folder for each split.

    Args:
        work: an empty folder.
        slices: the documents of this shard, as ranges of records in files.
        corpus: how the files are read and which documents are held out.
        settings: how documents are cut.
        tokenizer: of the datastore.
        on_problem: called with every problem in the data.
        advance: called with the bytes of text that are done, as the plan counts them.
        removed: [removed] int64, documents to leave out, counted from 0 in this shard.

    Returns:
        for each split the number of documents, chunks, tokens (with bos and eos) and bytes of text.
    """
    before = np.array([tokenizer.bos_id], dtype=tokenizer.dtype)
    after = np.array([tokenizer.eos_id], dtype=tokenizer.dtype)
    left_out = set() if removed is None else set(removed.tolist())
    read = _read(slices, corpus, left_out, on_problem, threads_of_a_batch() * _BATCH_BYTES)
    with contextlib.ExitStack() as files:
        writers = {name: _SplitWriter(work / name, settings, tokenizer, corpus.metadata_keys, files) for name in SPLITS}
        for batch, encoded in map_ahead(lambda batch: _tokenized(batch, tokenizer), read, _AT_A_TIME):
            if batch.documents and not encoded:
                (document,) = batch.documents
                parts = itertools.chain(
                    [before], tokenizer.encode_blocks(_counted(document.blocks(), advance)), [after]
                )
                writers[split_of_document(document, corpus.split)].append_large(document, parts, batch.file.name)
                continue
            members: dict[str, list[tuple[Document, np.ndarray]]] = {name: [] for name in writers}
            for document, tokens in zip(batch.documents, encoded, strict=True):
                whole = np.concatenate([before, tokens, after])
                members[split_of(document.text, corpus.split)].append((document, whole))
            for name, documents in members.items():
                writers[name].append(documents, batch.file.name)
            advance(batch.size)
        for writer in writers.values():
            writer.flush()
    return {name: writer.counts for name, writer in writers.items()}
