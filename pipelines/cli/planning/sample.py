"""Documents drawn uniformly from a corpus, and the size of the corpus."""

import heapq
import random
from dataclasses import dataclass, replace

from indexing.corpus.readers import CorpusSettings, Document
from indexing.corpus.scan import list_files, scan_file, split_of_document
from indexing.store.errors import InputError

_SCANNED_BYTES = 256 * 2**20  # bytes of text read for the sample


@dataclass(frozen=True)
class CorpusSample:
    """Documents drawn from a corpus, and the size of the corpus.

    Attributes:
        documents: uniformly drawn, in the order of the corpus.
        valid: documents of the `valid` split; all of them if there are few, so that nprobe is tuned with the queries of the real
            build.
        text_bytes: UTF-8 bytes in the whole corpus, estimated if only a part was read; 0 = unknown.
    """

    documents: list[Document]
    valid: list[Document]
    text_bytes: float


class _Enough(Exception):
    """Enough of the corpus has been read."""


class _Drawn:
    """Keeps about `limit` bytes of documents: those with the smallest random numbers."""

    def __init__(self, limit: int, rng: random.Random) -> None:
        self.limit, self.rng = limit, rng
        self.held = self.offered = 0
        self.kept: list[tuple[float, int, Document]] = []

    def offer(self, document: Document) -> None:
        self.offered += 1
        self.held += document.size
        heapq.heappush(self.kept, (-self.rng.random(), self.offered, document))
        while self.held - self.kept[0][2].size >= self.limit:
            self.held -= heapq.heappop(self.kept)[2].size

    def documents(self) -> list[Document]:
        return [document for _, _, document in sorted(self.kept, key=lambda entry: entry[1])]


def draw_sample(settings: CorpusSettings, sample_bytes: int, seed: int = 0) -> CorpusSample:
    """Draw documents of about `sample_bytes` of text, and a tenth as much held-out text.

    The blocks of a `LargeText` count as documents. Of a large corpus some files are read, in random order, until
    `_SCANNED_BYTES` of text have been seen.

    Raises:
        InputError: a path does not exist, or the corpus has no text.
    """
    rng = random.Random(seed)
    files = list_files(settings)
    drawn, valid = _Drawn(sample_bytes, rng), _Drawn(sample_bytes // 10, rng)
    seen = scanned_text = scanned_stored = 0

    def look_at(document: Document) -> None:
        nonlocal seen
        into = valid if split_of_document(document, settings.split) == "valid" else drawn
        for number, text in enumerate(document.blocks()):
            is_large, block_id = document.large is not None, f"{document.id}:{number}"
            part = replace(document, id=block_id, text=text, large=None) if is_large else document
            seen += part.size
            into.offer(part)
            if seen >= _SCANNED_BYTES:
                raise _Enough

    for file in rng.sample(files, len(files)):
        try:
            scanned_text += scan_file(file, settings, look_at).text_bytes
        except _Enough:
            break
        scanned_stored += file.size
    if not drawn.kept:
        raise InputError(f"corpus.paths = {settings.paths}: {len(files)} files contain no training document with text.")
    total = sum(file.size for file in files)
    text_bytes = scanned_text * total / scanned_stored if scanned_stored else 0.0
    return CorpusSample(drawn.documents(), valid.documents(), text_bytes)
