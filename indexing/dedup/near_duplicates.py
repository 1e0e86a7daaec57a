"""Find training documents that are near copies of an evaluation document or of an earlier training document.

    slices of a shard ──sign_shard──► signatures: MinHash bands, split and number of grams of every document
    signatures of all shards ──find_candidates──► documents that share a band with another document
    slices of a shard ──collect_grams──► gram sets of its candidates, read again
    all of these ──decide──► training documents to remove, each with the document it is near to and their exact Jaccard

Documents are decided in corpus order. A training document is removed if it is near to a held-out or evaluation
document, or to a training document that was kept. So the first document of a cluster stays, and every removed document
is near to one that stays. Whatever MinHash guesses, no document below the threshold is removed. Held-out documents are
never removed.
"""

import itertools
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import PositiveInt

from indexing.corpus.chunks import batches, with_text
from indexing.corpus.documents import CorpusSettings, Document
from indexing.corpus.scan import FileSlice, read_slice, split_of
from indexing.dedup.ngrams import Sketch, banding, gram_set, jaccard
from indexing.progress import Advance
from indexing.store.artifact import reading
from indexing.store.datastore import SPLITS
from indexing.store.errors import InputError
from indexing.store.files import NpyWriter, save_array
from indexing.store.remote import present
from indexing.store.settings import PositiveFraction, Text, settings
from indexing.store.sharded_array import ShardedArray, open_array
from indexing.tokenization.tokenizer import Tokenizer

TRAIN, EVALUATION = SPLITS.index("train"), len(SPLITS)
KINDS = (*SPLITS, "evaluation")
"""Kinds of documents, by their number in `splits.npy`."""


@settings
class DedupSettings:
    """Removal of near copies from the training documents. The default removes none."""

    within: bool = False
    """Of training documents that are near to each other, keep only the first in corpus order."""
    held_out: bool = False
    """Remove training documents that are near to a document of `valid` or `test` (paper, section 2.1)."""
    paths: tuple[Text, ...] = ()
    """Remove training documents that are near to a document in these files: an evaluation set, read like
    `corpus.paths`."""
    ngram: PositiveInt = 13
    """Units per n-gram (paper: 13). A unit is a word, or a character in scripts without spaces."""
    threshold: PositiveFraction = 0.8
    """Two documents are near if the Jaccard similarity of their n-gram sets is at least this (paper: 0.8)."""
    permutations: PositiveInt = 128
    """Permutations of MinHash. More take longer to compute, but leave fewer pairs to compare exactly. They hardly
    change which pairs are found, and never remove a document by mistake, because the final similarities are exact."""

    def __post_init__(self) -> None:
        if banding(self.threshold, self.permutations) is None:
            raise InputError(
                f"dedup.permutations = {self.permutations}: too few to find pairs of dedup.threshold = {self.threshold}; "
                "use more (128), or a higher threshold."
            )

    @property
    def is_on(self) -> bool:
        """Whether documents can be removed."""
        return self.within or self.held_out or bool(self.paths)

    @property
    def sketch(self) -> Sketch:
        """The function from gram sets to bands."""
        shape = banding(self.threshold, self.permutations)
        assert shape is not None
        return Sketch(*shape)


# --- one shard -----------------------------------------------------------------------------------------------------


def documents_of(
    slices: list[FileSlice], corpus: CorpusSettings, tokenizer_folder: Path, advance: Advance
) -> Iterator[tuple[FileSlice, Document]]:
    """Read the documents of a shard in order, with text also if tokens are stored. `advance` as in `chunk_shard`."""
    tokenizer = Tokenizer.open(tokenizer_folder)
    for file_slice in slices:
        for batch in batches(read_slice(file_slice, corpus, on_problem=lambda _: None)):
            for document in with_text(batch, file_slice.file.path, tokenizer):
                yield file_slice, replace(document, text="".join(document.blocks()), large=None)
            advance(sum(document.size for document in batch))


def sign_shard(
    work: Path,
    slices: list[FileSlice],
    corpus: CorpusSettings,
    settings: DedupSettings,
    tokenizer_folder: Path,
    *,
    is_evaluation: bool,
    advance: Advance,
) -> dict[str, int]:
    """Write the signatures of one shard into the folder `work`; returns its number of documents of each kind.

    bands.npy [bands, documents] uint64   sizes.npy [documents] int64, distinct grams   splits.npy [documents] uint8, of KINDS
    """
    sketch = settings.sketch
    bands, sizes, splits = [], [], []
    for _, document in documents_of(slices, corpus, tokenizer_folder, advance):
        grams = gram_set(document.text, settings.ngram)
        bands.append(sketch(grams))
        sizes.append(len(grams))
        splits.append(EVALUATION if is_evaluation else SPLITS.index(split_of(document.text, corpus.split)))
    save_array(work / "bands.npy", np.array(bands, np.uint64).reshape(-1, sketch.bands).T.copy())
    save_array(work / "sizes.npy", np.array(sizes, np.int64))
    save_array(work / "splits.npy", np.array(splits, np.uint8))
    return {name: splits.count(kind) for kind, name in enumerate(KINDS)}


def collect_grams(
    work: Path,
    slices: list[FileSlice],
    rows: np.ndarray,
    corpus: CorpusSettings,
    settings: DedupSettings,
    tokenizer_folder: Path,
    *,
    advance: Advance,
) -> int:
    """Write the gram sets of some documents of one shard into the folder `work`; returns their number of grams.

    grams.npy [grams] uint64, sets concatenated   documents.parquet: id, file, line of each document

    `rows` [candidates] int64 are the positions of the documents in the shard, counted from 0, ascending.
    """
    import pyarrow
    import pyarrow.parquet

    candidates = set(rows.tolist())
    documents = itertools.islice(
        documents_of(slices, corpus, tokenizer_folder, advance), max(candidates, default=-1) + 1
    )
    names: dict[str, list[Any]] = {"id": [], "file": [], "line": []}
    with NpyWriter(work / "grams.npy", np.uint64) as writer:
        for row, (file_slice, document) in enumerate(documents):
            if row in candidates:
                writer.append(gram_set(document.text, settings.ngram))
                for key, value in zip(names, (document.id, file_slice.file.name, document.record + 1), strict=True):
                    names[key].append(value)
    schema = pyarrow.schema([("id", pyarrow.string()), ("file", pyarrow.string()), ("line", pyarrow.int64())])
    pyarrow.parquet.write_table(pyarrow.table(names, schema=schema), work / "documents.parquet")
    return writer.rows


# --- all shards ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signatures:
    """The signatures of all shards in corpus order, with evaluation files last. A document is identified by its
    position.

    Attributes:
        folders: folders of the shards.
        sizes: [documents] int64, distinct grams of each.
        splits: [documents] uint8, of KINDS.
        starts: [shards+1] int64, first document of each shard.
    """

    folders: list[Path]
    sizes: np.ndarray
    splits: np.ndarray
    starts: np.ndarray

    @classmethod
    def open(cls, folders: Sequence[Path]) -> "Signatures":
        """Read sizes and splits, which takes 9 bytes per document; bands stay on disk."""
        sizes, splits = ([open_array(folder / f"{name}.npy") for folder in folders] for name in ("sizes", "splits"))
        starts = np.concatenate([[0], np.cumsum([len(shard) for shard in sizes], dtype=np.int64)])
        return cls(list(folders), np.concatenate(sizes), np.concatenate(splits), starts)

    def band(self, band: int) -> np.ndarray:
        """[documents] uint64, the hashes of one band."""
        return np.concatenate([open_array(folder / "bands.npy")[band] for folder in self.folders])


def find_candidates(signatures: Signatures, settings: DedupSettings, *, advance: Advance) -> np.ndarray:
    """Find documents that share buckets: [meetings, 2] int64, document and bucket, in order of document.

    A bucket holds the documents with the same hash in the same band. Buckets in which nothing can be removed are left
    out: those without training documents, or with one and nothing to compare it with. `advance` is called after every
    band.

    Memory holds one band at a time, about 30 bytes per document, and 16 bytes for every meeting.
    """
    is_train = signatures.splits == TRAIN
    active = np.flatnonzero((signatures.sizes > 0) & (is_train | _is_reference(signatures, settings)))
    parts, num_buckets = [np.zeros((0, 2), np.int64)], 0
    for band in range(settings.sketch.bands):
        hashes = signatures.band(band)[active]
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        starts = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1])[: len(hashes)])
        if len(starts):
            members = np.diff(np.append(starts, len(hashes)))
            training = np.add.reduceat(is_train[active[order]], starts, dtype=np.int64)
            is_useful = (training > 0) & ((members > training) | (settings.within & (training > 1)))
            documents = active[order[np.repeat(is_useful, members)]]
            buckets = num_buckets + np.repeat(np.arange(is_useful.sum()), members[is_useful])
            parts.append(np.stack([documents, buckets], axis=1))
            num_buckets += int(is_useful.sum())
        advance(1)
    meetings = np.concatenate(parts)
    return meetings[np.argsort(meetings[:, 0], kind="stable")]


def _is_reference(signatures: Signatures, settings: DedupSettings) -> np.ndarray:
    """Which documents are compared with but never removed: [documents] bool."""
    is_held_out = (signatures.splits != TRAIN) & (signatures.splits != EVALUATION)
    return (signatures.splits == EVALUATION) | (is_held_out & settings.held_out)


class GramSets:
    """The stored gram sets of candidates, memory-mapped, and the documents' names.

    Args:
        folders: outputs of `collect_grams` for every shard.
        candidates: [candidates] int64 document numbers, ascending.
        signatures: signatures of all documents.
    """

    def __init__(self, folders: Sequence[Path], candidates: np.ndarray, signatures: Signatures) -> None:
        self.folders, self.candidates = list(folders), candidates
        self.ends = np.cumsum(signatures.sizes[candidates])
        self.firsts = np.searchsorted(candidates, signatures.starts)  # [shards+1], first candidate of each shard
        totals = np.append(0, self.ends)[self.firsts]
        self.grams = ShardedArray([folder / "grams.npy" for folder in folders], np.diff(totals).tolist())
        self._names = lru_cache(maxsize=16)(self._read_names)

    def __getitem__(self, document: int) -> np.ndarray:
        """The gram set of one document: [grams] uint64, sorted."""
        row = int(np.searchsorted(self.candidates, document))
        return self.grams.read(int(self.ends[row - 1]) if row else 0, int(self.ends[row]))

    def name(self, document: int) -> dict[str, Any]:
        """The document's id, file and line."""
        row = int(np.searchsorted(self.candidates, document))
        shard = int(np.searchsorted(self.firsts, row, side="right")) - 1
        return self._names(shard).slice(row - int(self.firsts[shard]), 1).to_pylist()[0]

    def _read_names(self, shard: int) -> Any:
        import pyarrow.parquet

        path = present(self.folders[shard] / "documents.parquet")
        with reading(path):
            return pyarrow.parquet.read_table(path)


def decide(
    meetings: np.ndarray, signatures: Signatures, sets: GramSets, settings: DedupSettings, *, advance: Advance
) -> Iterator[tuple[int, int, float]]:
    """Yield the training documents to remove, in corpus order: document, the first document it is near to, their
    Jaccard.

    A document is compared with held-out and evaluation documents, then, if `within`, with training documents that were
    kept. Kept documents are at the front of their bucket, so each of a thousand copies is compared with one document
    only. `meetings` [meetings, 2] int64 is the result of `find_candidates`; `sets` holds the gram sets of the documents
    in it. `advance` is called for every training document.
    """
    documents, buckets = meetings.T
    members = np.bincount(buckets)
    fronts = np.cumsum(members) - members
    filled = np.zeros(len(members), np.int64)
    comparable = np.empty(len(documents), np.int64)  # bucket by bucket

    def keep(document: int, where: np.ndarray) -> None:
        comparable[fronts[where] + filled[where]] = document
        filled[where] += 1

    is_reference = _is_reference(signatures, settings)
    candidates, firsts, lengths = np.unique(documents, return_index=True, return_counts=True)
    stays = is_reference[candidates]
    for document, first, length in zip(candidates[stays], firsts[stays], lengths[stays], strict=True):
        keep(document, buckets[first : first + length])
    for document, first, length in zip(candidates[~stays], firsts[~stays], lengths[~stays], strict=True):
        where = buckets[first : first + length]
        others = np.unique(np.concatenate([comparable[fronts[b] : fronts[b] + filled[b]] for b in where]))
        near = _first_near(
            document, others[np.argsort(~is_reference[others], kind="stable")], signatures, sets, settings
        )
        if near is not None:
            yield int(document), *near
        elif settings.within:
            keep(document, where)
        advance(1)


def _first_near(
    document: int, others: np.ndarray, signatures: Signatures, sets: GramSets, settings: DedupSettings
) -> tuple[int, float] | None:
    sizes = signatures.sizes
    grams = None
    for other in others.tolist():
        small, large = sorted((int(sizes[document]), int(sizes[other])))
        if small / large < settings.threshold:  # the Jaccard similarity is at most small / large
            continue
        grams = sets[document] if grams is None else grams
        similarity = jaccard(grams, sets[other])
        if similarity >= settings.threshold:
            return other, similarity
    return None


def write_removed(
    work: Path,
    removals: Iterator[tuple[int, int, float]],
    signatures: Signatures,
    sets: GramSets,
    shards: Sequence[str],
) -> dict[str, int]:
    """Write the result of `decide` into the folder `work`; returns how many documents are removed, by the kind they are
    near to.

    removed.jsonl: a line per document, with the document it is near to   SHARD.npy [removed] int64: positions in a shard

    `shards` are the names of the corpus's shards, which are the first ones of the signatures.
    """
    counts = dict.fromkeys(KINDS, 0)
    positions = [array("q") for _ in shards]
    with open(work / "removed.jsonl", "w", encoding="utf-8") as listing:
        for document, other, similarity in removals:
            kind = KINDS[signatures.splits[other]]
            near = {f"near_{key}": value for key, value in sets.name(other).items()}
            line = sets.name(document) | {"reason": f"near {kind}"} | near | {"jaccard": round(similarity, 6)}
            listing.write(json.dumps(line, ensure_ascii=False) + "\n")
            shard = int(np.searchsorted(signatures.starts, document, side="right")) - 1
            positions[shard].append(document - int(signatures.starts[shard]))
            counts[kind] += 1
    for name, rows in zip(shards, positions, strict=True):
        save_array(work / f"{name}.npy", np.array(rows, np.int64))
    return counts
