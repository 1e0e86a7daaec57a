"""Write files, and read their documents and tokens."""

import gzip
import json
from pathlib import Path

import numpy as np
import zstandard

from indexing.corpus.documents import CorpusFile, CorpusProblem, CorpusSettings, Document
from indexing.corpus.readers import read_documents
from indexing.corpus.scan import list_files


def only_file(path: object) -> CorpusFile:
    (file,) = list_files(CorpusSettings(paths=(str(path),)))
    return file


def read(path: object, **settings: object) -> tuple[list[Document], list[CorpusProblem]]:
    """All documents and problems of the one file at `path`."""
    problems: list[CorpusProblem] = []
    corpus = CorpusSettings(**settings)  # type: ignore[arg-type]
    return list(read_documents(only_file(path), corpus, on_problem=problems.append)), problems


def read_all(path: object) -> tuple[int, int]:
    """Read the one file at `path` document by document; returns the numbers of documents and problems."""
    problems: list[CorpusProblem] = []
    documents = read_documents(only_file(path), CorpusSettings(), on_problem=problems.append)
    return sum(1 for _ in documents), len(problems)


def to_tokens(chunks: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Join the chunks of a document: chunks [n, m] and lengths [n] → tokens [t]."""
    return np.asarray(chunks)[np.arange(chunks.shape[1]) < np.asarray(lengths)[:, None]]


def compress(data: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(data)
    return zstandard.compress(data) if suffix == ".zst" else data


def lines(*values: object) -> bytes:
    return b"".join((value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n" for value in values)


def kinds(problems: list[CorpusProblem]) -> list[tuple[str, int]]:
    return [(problem.kind, problem.line) for problem in problems]


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
