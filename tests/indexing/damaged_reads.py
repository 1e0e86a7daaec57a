"""Reads of a datastore whose files are damaged one after another, in a process that a read outside of a file ends.

Arrays that compiled loops read or write lie in memory of their own between pages that nobody may touch: at the end of it, then at its
begin. So an access to the element before the first one or behind the last one is a signal, and not only one that is far away.
"""

import ctypes
import io
import mmap
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from indexing.ngrams import search as ngram_search
from indexing.ngrams.search import NgramIndex
from indexing.similarity import shared_tokens
from indexing.similarity.shared_tokens import SharedTokens
from indexing.store import mapped
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from indexing.store.sharded_array import ShardedArray
from indexing.suffixes import mapped_files, order
from indexing.suffixes.order import LONGEST, Prefixes, stored_orders
from indexing.suffixes.search import SuffixIndex
from indexing.suffixes.texts import Texts
from indexing.suffixes.votes import read_columns
from indexing.suffixes.votes_build import occurrences_of

DONE = "done"
_HEADER = 128  # bytes of the header of our `.npy` files
_KEPT: list[mmap.mmap] = []  # until the next case


def guarded(array: np.ndarray, *, at_end: bool) -> np.ndarray:
    """A copy of an array with pages around it that must not be read or written; as close to one of them as its alignment allows."""
    page, size = mmap.PAGESIZE, -(-max(array.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + 2 * page)
    _KEPT.append(memory)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for address in (begin, begin + page + size):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(page), 0) == 0
    copied = np.ndarray(array.shape, array.dtype, memory, page + (size - array.nbytes if at_end else 0))
    copied[...] = array
    return copied


def guard_reads(at_end: list[bool]) -> None:
    """Let compiled loops use only such memory from now on; `at_end` has the current side."""
    open_rows, open_array, shard = mapped_files.open_rows, order.open_array, ShardedArray.shard
    mapped_files.open_rows = lambda *arguments: guarded(open_rows(*arguments), at_end=at_end[0])
    order.open_array = lambda path: guarded(open_array(path), at_end=at_end[0])
    order.fetch = mapped_files.read_scattered = lambda *_: None
    ShardedArray.shard = lambda self, number: guarded(shard(self, number), at_end=at_end[0])
    ShardedArray.scattered = ShardedArray.shard
    for module in (ngram_search, shared_tokens):
        module.compiled = partial(_with_guarded_arguments, module.compiled, at_end)


def _with_guarded_arguments(compiled: Callable, at_end: list[bool], function: Callable) -> Callable:
    def call(*arguments: Any) -> None:
        copies = [guarded(a, at_end=at_end[0]) if isinstance(a, np.ndarray) else a for a in arguments]
        compiled(function)(*copies)
        for array, copied in zip(arguments, copies, strict=True):
            if isinstance(array, np.ndarray) and array.flags.writeable:
                array[...] = copied

    return call


def damages(data: bytes, other: bytes, header: int) -> Iterator[tuple[str, bytes]]:
    """Contents of a file after damage of each kind: `header` are the bytes of its header, `other` is the content of a file like it."""
    body, random = np.frombuffer(data, np.uint8)[header:], np.random.default_rng(len(data))

    def changed(rows: slice, values: Any) -> bytes:
        copied = body.copy()
        copied[rows] = values
        return data[:header] + copied.tobytes()

    for number in range(3):
        flipped = body.copy()
        flipped[random.integers(0, max(1, len(body)), 1 + len(body) // 4000 * number**3)] ^= 1 << number
        yield f"bit {number}", data[:header] + flipped.tobytes()
    yield "0xff", changed(slice(None), 0xFF)
    yield "0xff at the end", changed(slice(-4096, None), 0xFF)
    yield "0xff at the begin", changed(slice(0, 4096), 0xFF)
    yield "zeros", changed(slice(None), 0)
    yield "zeros in the first half", changed(slice(0, len(body) // 2), 0)
    yield "0x7f", changed(slice(None), 0x7F)
    yield "random", data[:header] + random.bytes(len(body))
    yield "reversed", data[:header] + body[::-1].tobytes()
    yield "swapped", other
    yield "truncated", data[: header + len(body) // 2]
    yield "header alone", data[:header]
    yield "empty", b""
    for number in range(4):  # of the header: type, order, shape
        flipped = bytearray(data)
        flipped[random.integers(0, max(1, header))] ^= 1 << random.integers(0, 7)
        yield f"header {number}", bytes(flipped)


def headers(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The values of an array in files whose headers say something else."""
    array = np.load(io.BytesIO(data))
    table, arrays = array.reshape(len(array), -1), {"one row": array[:1], "no dimension": np.array(array.flat[0])}
    arrays |= {dtype: array.astype(dtype) for dtype in ("u1", "<u2", "<u4", "<i8", ">i8", "<f4", "<f8")}
    arrays |= {
        "a column": table[:, :1],
        "more columns": np.repeat(table, 9, axis=1),
        "turned": np.asfortranarray(table),
    }
    for name, changed in arrays.items():
        file = io.BytesIO()
        np.save(file, changed)
        yield name, file.getvalue()


def search(folder: Path, text: np.ndarray) -> Iterator[Callable[[], Any]]:
    """Searches of the sorted prefixes, as those of generation and traces, and as those of the stage `votes`."""
    index = SuffixIndex.open(folder)
    yield lambda: index.votes(text)
    yield lambda: index.longest_match(text[:40])
    yield lambda: index.next_tokens(index.longest_match(text[:1]))
    yield lambda: index.ends(index.longest_match(text[:30]))
    for size in (1, 2, 5, 33):
        yield partial(index.votes, text[:size])
    for begin in index.split.tokens.starts[:-1].tolist():  # of a shard, after tokens that are not before it
        of_shard = index.split.tokens.read(begin, begin + 3).reshape(-1).astype(np.int64)
        yield partial(index.votes, np.append(text[-9:], of_shard))
    texts = Texts(index.split)
    files = mapped_files.MappedFiles(texts, [Prefixes(texts, parts) for _, parts in stored_orders(texts.split)])
    window = np.zeros((len(text), LONGEST), texts.dtype)
    for end in range(len(text)):
        window[end, : end + 1] = text[end::-1][:LONGEST] + 1
    yield lambda: occurrences_of(files, window, np.arange(len(text)))


def find_ngrams(folder: Path, _: np.ndarray) -> Iterator[Callable[[], Any]]:
    """Neighbors by n-grams, which are then ordered by shared tokens."""
    datastore = Datastore.open(folder)
    split, retrieval = datastore.train, RetrievalSet([datastore.train])
    tokens, lengths = split.tokens.read(0, 64), split.lengths.read(0, 64)
    index, weights = NgramIndex.open(retrieval), np.ones(split.vocab_size, np.float32)
    yield lambda: SharedTokens(weights, retrieval).best(
        tokens, index.search(tokens, lengths, 6, 4, lambda rows, ids: ids, own=True), 2
    )


def read_votes(folder: Path, _: np.ndarray) -> Iterator[Callable[[], Any]]:
    """All stored votes."""
    split = Datastore.open(folder).train
    yield lambda: read_columns(split, np.arange(split.num_chunks))


READS: dict[str, tuple[Callable, ...]] = {
    "suffixes": (search,),
    "chunks": (search, find_ngrams),
    "votes": (read_votes,),
    "ngrams": (find_ngrams,),
}


def read_all(folder: Path, stage: str, text: np.ndarray) -> None:
    """Make every read of a stage's files. An error names a file; that of a damaged text may be one of numpy, which checks indexes."""
    errors = Exception if stage == "chunks" else InputError
    for reads in READS[stage]:
        with suppress(errors):
            for read in reads(folder, text):
                with suppress(errors):
                    read()


def read_damaged(folder: Path, copy: Path, names: list[str], log: Path) -> None:
    """Damage each of some files of a copy of a datastore in every way, and read it. Writes each case to `log` before it is read."""
    shutil.copytree(folder, copy)
    split = Datastore.open(folder).train
    text = np.asarray(split.tokens.read(3, 7)).reshape(-1).astype(np.int64)
    mapped.first_use = lambda file: file  # as if checksums agreed: those of somebody else's datastore can
    at_end = [True]
    guard_reads(at_end)
    for stage in READS:
        read_all(copy, stage, text)
    for file, name in enumerate(names):
        data, top = (folder / name).read_bytes(), Path(name).parts[0]
        alike = [file.read_bytes() for file in sorted(folder.glob(f"{top}/**/{Path(name).name}"))]
        other = next((content for content in alike if content != data), data)
        cases = (
            [*damages(data, other, _HEADER), *headers(data)] if name.endswith(".npy") else [*damages(data, other, 0)]
        )
        for number, (case, content) in enumerate(cases):
            log.write_text(f"{name}, {case}")
            (copy / name).unlink()  # what is mapped stays as it is
            (copy / name).write_bytes(content)
            at_end[0] = (number + file) % 2 == 0
            read_all(copy, top, text)
            _KEPT.clear()
        (copy / name).write_bytes(data)
    log.write_text(DONE)
