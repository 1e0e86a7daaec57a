"""Evaluation sets: named splits of held-out documents.

    evaluation.sets, "NAME=DATASTORE:SPLIT" → EvaluationSet → Evaluator → NAME_bits_per_byte_on, NAME_bits_per_byte_off

A set uses the neighbors that its datastore stores for the split; these are chunks of the datastore's training split.
"""

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

import numpy as np

from indexing.retrieval.prefix_neighbors import searches_prefixes
from indexing.store.datastore import SPLITS, Datastore, Split
from indexing.store.errors import InputError
from indexing.store.ranged_reads import Reading
from indexing.store.remote import url_of
from indexing.store.retrieval_set import check_tokenizer
from indexing.suffixes.votes import stores_votes
from indexing.tokenization.metadata import read_meta, read_token_bytes
from retro.model.datastore_fit import check_fits
from retro.model_settings import ModelSettings

log = logging.getLogger("retro")

HELD_OUT = tuple(name for name in SPLITS if name != "train")
_ACCEPTED = (
    "accepted are NAME=DATASTORE:SPLIT, NAME=DATASTORE (its valid split), or a SPLIT of the first training datastore; "
    f"splits: {', '.join(HELD_OUT)}; names have letters, digits and . _ -"
)


@dataclass(frozen=True)
class EvaluationSet:
    """A named split of a datastore.

    Attributes:
        name: name in tables and prefix of metrics.
        datastore: datastore with the documents and their neighbors.
        split_name: name of the split.
    """

    name: str
    datastore: Datastore
    split_name: str = "valid"

    @cached_property
    def split(self) -> Split:
        """The split to score."""
        return self.datastore.split(self.split_name)

    @property
    def is_empty(self) -> bool:
        """True without documents that are not deleted."""
        return self.split.num_documents == len(self.split.deleted)

    @property
    def tokens(self) -> int:
        """Number of tokens in the split, without deleted documents."""
        deleted = [np.arange(*chunks) for chunks in self.split.deleted]
        without = self.split.lengths.gather(np.concatenate(deleted)).sum() if deleted else 0
        return int(sum(self.datastore.manifest["splits"][self.split_name]["tokens"]) - without)

    @property
    def token_bytes(self) -> np.ndarray:
        """Number of text bytes in each token, [vocabulary]."""
        return read_token_bytes(self.datastore.folder / "tokenizer")

    def text_bytes(self, chunks: np.ndarray) -> np.ndarray:
        """Number of bytes of the text in each token of chunks: ids [n] int64 → [n, m] uint16; arbitrary in padding."""
        sizes: np.ndarray = self.token_bytes[self.split.tokens.gather(chunks)]
        first = self.split.documents_of(chunks)[1] == chunks
        added = read_meta(self.datastore.folder / "tokenizer").added_bytes
        sizes[first, 1] -= np.minimum(sizes[first, 1], added)  # the text begins after BOS
        return sizes

    def check(self, model: ModelSettings, k: int) -> None:
        """Raise InputError unless a model with k neighbors for each chunk (0 = retrieval OFF) can be scored on this
        set."""
        where = f"evaluation set {self.name!r}: {self.datastore.folder}"
        check_fits(model, self.datastore.manifest, where)
        if self.is_empty:
            raise InputError(
                f"{where} has no {self.split_name} documents that are not deleted. Give {self.split_name} a weight in corpus.split and rebuild, "
                "or remove the set from evaluation.sets."
            )
        if model.copy_head.datastore:
            stores_votes(self.datastore)
        if k and not searches_prefixes(self.datastore):
            self.datastore.require("neighbors")
            stored = self.split.neighbor_ids.row_shape[0]
            if k > stored:
                raise InputError(
                    f"k = {k} (while training: data.k): {where} stores {stored} neighbors (neighbors.stored)."
                )


def parse_set(entry: str) -> tuple[str, str, str]:
    """Parse an entry of `evaluation.sets`: name, folder of the datastore ("" = the first training datastore), split.

    Raises:
        InputError: the entry is invalid; the message names the key and what is accepted.
    """
    name, named, place = entry.partition("=")
    folder, colon, split = place.rpartition(":")
    if not named:
        folder, split = "", name
    elif not colon or "/" in split:  # the colon is part of the path
        folder, split = place, "valid"
    if not re.fullmatch(r"[\w.-]+", name) or (named and not folder) or split not in HELD_OUT:
        raise InputError(f"evaluation.sets has {entry!r}: {_ACCEPTED}.")
    return name, folder, split


def check_entries(entries: Sequence[str]) -> None:
    """Raise InputError if `evaluation.sets` has an invalid entry or a name occurs twice."""
    names = [parse_set(entry)[0] for entry in entries]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(
            f"evaluation.sets has {', '.join(map(repr, twice))} more than once; each set needs its own name."
        )


def open_sets(
    entries: Sequence[str], folders: Sequence[Path], model: ModelSettings, k: int, reading: Reading = "mmap"
) -> list[EvaluationSet]:
    """Open the sets in `evaluation.sets`; if it is empty, `valid` of every training datastore with held-out documents.

    Args:
        entries: `evaluation.sets`.
        folders: the training datastores.
        model: the sets must fit this model.
        k: largest number of neighbors that a chunk reads; 0 = none.
        reading: method of reading the datastores.

    Raises:
        InputError: a datastore is missing, has no such documents, or does not fit the model; the message names the set.
    """
    if entries:
        return [_open_entry(entry, folders[0], model, k, reading) for entry in entries]
    unique = list(dict.fromkeys(Path(os.path.abspath(folder)) for folder in folders))
    names = [re.sub(r"[^\w.-]", "_", name) for name in short_names(unique)] if len(unique) > 1 else ["valid"]
    sets = []
    for name, folder in zip(names, unique, strict=True):
        opened = EvaluationSet(name, Datastore.open(folder, reading))
        if not opened.is_empty:
            opened.check(model, k)
            sets.append(opened)
        else:
            log.warning("%s has no held-out documents and is not evaluated", folder)
    return sets


def _open_entry(entry: str, first: Path, model: ModelSettings, k: int, reading: Reading) -> EvaluationSet:
    name, folder, split = parse_set(entry)
    try:
        datastore = Datastore.open(folder or first, reading)
    except InputError as error:
        raise InputError(f"evaluation.sets has {entry!r}: {error}") from error
    if split not in datastore.manifest["splits"]:
        raise InputError(
            f"evaluation.sets has {entry!r}: {datastore.folder} has no split {split!r}, "
            f"only {', '.join(datastore.manifest['splits'])}. Name one of these, or rebuild the datastore."
        )
    opened = EvaluationSet(name, datastore, split)
    opened.check(model, k)
    # Tokenizers of equal size can differ. If the training datastore was deleted, only the sizes can be compared.
    if url_of(first) or (first / "tokenizer").exists():
        check_tokenizer(Datastore.open(first), datastore, f"evaluation.sets has {entry!r}")
    return opened


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return short unique names for folders: their own names, or the parts of their paths that differ."""
    parts = [reversed(Path(os.path.abspath(folder)).parts[1:]) for folder in folders]
    levels = list(zip_longest(*parts, fillvalue=""))  # the folders' own names come first
    height = 1
    while height < len(levels) and len(set(zip(*levels[:height], strict=True))) < len(folders):
        height += 1
    telling = [level for level in levels[:height] if len(set(level)) > 1] or levels[:1]
    names = ["-".join(filter(None, reversed(level))) for level in zip(*telling, strict=True)]
    return [name or Path(folder).name for name, folder in zip(names, folders, strict=True)]
