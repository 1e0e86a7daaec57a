"""Read the documents of a file and their tokens."""

import numpy as np

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
