"""Bits per byte of texts that are not in the datastore, retrieval OFF and ON: does retrieval harm other text?

    files ─readers─► a sample of documents ─tokenizer─► a random window of each ─LanguageModel─► OFF and ON ─► rows (JSON)

Neighbors and votes are searched live, as in generation.
"""

import heapq
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from indexing.corpus.chunks import with_text
from indexing.corpus.documents import CorpusFile, CorpusProblem, CorpusSettings, Document
from indexing.corpus.readers import read_documents
from indexing.corpus.scan import list_files
from indexing.progress import Advance, Progress, percentage
from indexing.splitmix64 import mix
from indexing.store.errors import InputError
from indexing.tokenization.tokenizer import PIECE, Tokenizer
from retro.checkpoints.checkpoint import Checkpoint
from retro.evaluation.bits_per_byte import SetResult, mode_of
from retro.evaluation.perplexity import Row, level
from retro.evaluation.sets import short_names
from retro.evaluation.settings import PerplexitySettings
from retro.inference.language_model import LanguageModel

log = logging.getLogger("retro")

MOST_TOKENS = 20_000
"""Tokens of a path that are scored if `evaluation.max_tokens` is 0."""


class SampledText(NamedTuple):
    """A document that is scored.

    Attributes:
        id: of the document.
        tokens: [t] int64 of a window; if it is the beginning, the beginning-of-document token comes first.
        begins: whether the window is the beginning of the document.
    """

    id: str
    tokens: np.ndarray
    begins: bool


def check_texts(checkpoint: Checkpoint, settings: PerplexitySettings) -> None:
    """Raise InputError if texts are set and the model cannot be measured with retrieval ON."""
    named = f"texts = {' '.join(settings.texts)}"
    if settings.texts and not checkpoint.model.uses_datastore:
        raise InputError(
            f"{named}: {checkpoint.path} has no retrieval (model.retrieval.cca_layers, model.copy_head), so it can be "
            "measured OFF only. Name a model with retrieval, or remove --texts."
        )
    if settings.texts and not settings.k:
        raise InputError(f"{named}: --k is empty. Texts are scored with the largest k.")


def text_files(settings: PerplexitySettings) -> dict[str, list[CorpusFile]]:
    """The files of each path of the texts.

    Raises:
        InputError: a path does not exist, or has no file that can be read.
    """
    return {path: list_files(CorpusSettings(paths=(path,)), "texts") for path in settings.texts}


def evaluate_texts(
    model: LanguageModel,
    files: Mapping[str, Sequence[CorpusFile]],
    settings: PerplexitySettings,
    progress: Progress = percentage,
    on_result: Callable[[SetResult], None] = lambda _: None,
) -> list[Row]:
    """Measure texts with a model that was opened with its datastore: a row for each path, as plain values.

    A row has `set`, `path`, where its `windows` are from, the fingerprint of the searched `datastore`, `results` (OFF,
    and ON with the largest k) and `changes` as those of held-out sets, and `worst`, the document whose bits grow most
    in percent.

    Args:
        model: a model with retrieval.
        files: see `text_files`.
        settings: k, window, number of tokens of each path, documents in a batch, seed.
        progress: shows the work.
        on_result: receives each measurement as soon as it is finished.

    Raises:
        InputError: a path has no document with text.
    """
    assert model.retriever is not None
    rows = []
    for name, path in zip(short_names([Path(path) for path in files]), files, strict=True):
        with progress(f"read {name}", total=None, unit="documents") as advance:
            texts = sample_texts(path, files[path], model, settings, advance)
        off, on = score_texts(model, name, texts, max(settings.k), settings.batch_size, progress)
        on_result(off)
        on_result(on)
        labels = {"set": name, "path": path, "windows": settings.text_windows}
        labels["datastore"] = model.retriever.datastore.fingerprint
        rows.append(level(labels | {"worst": _worst(texts, off, on)}, [off, on], settings.seed))
    return rows


# --- reading ---------------------------------------------------------------------------------------------------------


def sample_texts(
    path: str, files: Sequence[CorpusFile], model: LanguageModel, settings: PerplexitySettings, advance: Advance
) -> list[SampledText]:
    """Draw documents of a path at random, up to the number of tokens of the settings, and cut each to a window.

    The documents are read once, and memory holds the sample only: those with the smallest hashes of their numbers.
    """
    most = settings.max_tokens or MOST_TOKENS
    window = min(settings.window or model.context, model.context, most + 1)
    problems: dict[str, CorpusProblem] = {}  # the first of each kind

    def note(problem: CorpusProblem) -> None:
        problems.setdefault(problem.kind, problem)

    # Of the sample, the largest hash first. A document whose hash is not below the limit would exceed the number of
    # tokens.
    sample, tokens, limit = list[tuple[int, int, SampledText]](), 0, 1 << 64
    number = 0
    for file in files:
        for document in read_documents(file, CorpusSettings(), on_problem=note):
            point, number = mix(mix(settings.seed) ^ number), number + 1
            if point < limit:
                at = (0, 0) if settings.text_windows == "beginning" else (mix(point), mix(point + 1))
                text = _window(document, file.path, model.tokenizer, window, *at)
                if num_bytes(text, model.tokenizer):
                    heapq.heappush(sample, (-point, number, text))
                    tokens += len(text.tokens) - 1
                while tokens > most:
                    largest, _, left_out = heapq.heappop(sample)
                    limit, tokens = -largest, tokens - len(left_out.tokens) + 1
            advance(1)
    found = [f"{problem.file}:{problem.line}: {problem.kind}: {problem.detail}" for problem in problems.values()]
    if not sample:
        raise InputError(f"texts: {path!r} has no document with text to score. {' '.join(found[:1])}".strip())
    for words in found:
        log.warning("texts: %s", words)
    return [text for _, _, text in sorted(sample, key=lambda entry: entry[1])]


def _window(document: Document, path: str, tokenizer: Tokenizer, count: int, part: int, place: int) -> SampledText:
    """At most `count` tokens of a document.

    Args:
        document: the document.
        path: of its file.
        tokenizer: of the datastore.
        count: tokens of the window, at least 2.
        part: a random number below 2^64, for the part of a long text; 0 = the first.
        place: another one, for the place in this part; 0 = its beginning.
    """
    begins = True
    if document.tokens is None:
        text, begins = _part(document, part * document.size >> 64)
        tokens = tokenizer.encode(text)
    else:
        with_text([document], path, tokenizer)  # raises InputError if they are not of this tokenizer
        tokens = document.tokens
    tokens = np.concatenate([np.full(int(begins), tokenizer.bos_id), tokens]).astype(np.int64)
    start = place * (max(0, len(tokens) - count) + 1) >> 64
    return SampledText(document.id, tokens[start : start + count], begins and start == 0)


def _part(document: Document, byte: int) -> tuple[str, bool]:
    """The part of a text that has a byte, of at most `PIECE` characters, and whether it is the beginning.

    To tokenize a whole book takes long.
    """
    read, text = 0, ""
    for block in document.blocks():
        for first in range(0, len(block), PIECE):
            text, before = block[first : first + PIECE], read
            read += len(text.encode())
            if read > byte:
                return text, before == 0
    return text, False


def num_bytes(text: SampledText, tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of the text of the scored tokens, all but the first, without those that the tokenizer adds."""
    added = tokenizer.meta.added_bytes if text.begins else 0
    return max(0, int(tokenizer.token_bytes[text.tokens[1:]].sum()) - added)


# --- scoring ---------------------------------------------------------------------------------------------------------


def score_texts(
    model: LanguageModel, name: str, texts: Sequence[SampledText], k: int, batch_size: int, progress: Progress
) -> tuple[SetResult, SetResult]:
    """Score texts with retrieval OFF, and with k neighbors and the votes of the datastore. The speed is of both
    together."""
    settings, tokens = model.model.settings, sum(len(text.tokens) - 1 for text in texts)
    ways = (0, False), (k if settings.retrieves else 0, bool(settings.copy_head.datastore))
    started, nats = time.perf_counter(), (list[float](), list[float]())
    with progress(f"eval {name} {mode_of(*ways[0])}, {mode_of(*ways[1])}", total=tokens, unit="tokens") as advance:
        for first in range(0, len(texts), batch_size):
            part = [text.tokens for text in texts[first : first + batch_size]]
            for of_way, scores in zip(nats, model.score_off_and_on(part, k), strict=True):
                of_way += [-float(log_p.sum()) for log_p in scores]
            advance(sum(map(len, part)) - len(part))
    off, on = (
        SetResult(
            set=name,
            k=k_read,
            tokens=tokens,
            tokens_per_second=tokens / (time.perf_counter() - started),
            nats_by_document=np.array(of_way),
            bytes_by_document=np.array([num_bytes(text, model.tokenizer) for text in texts], dtype=np.float64),
            votes=votes,
        )
        for (k_read, votes), of_way in zip(ways, nats, strict=True)
    )
    return off, on


def _worst(texts: Sequence[SampledText], off: SetResult, on: SetResult) -> Row:
    """The document whose bits grow most in percent, with its change in percent and in bits."""
    added = on.nats_by_document - off.nats_by_document
    changes = added / off.nats_by_document
    worst = int(changes.argmax())
    return {
        "id": texts[worst].id,
        "percent": 100 * float(changes[worst]),
        "bits": float(added[worst]) / math.log(2),
    }
