"""Retrieval metrics of a search: hit@k, recall@k and MRR over the questions of a set.

questions → chunks, best first → their documents, each ranked by its best chunk → ranks of the documents with an answer
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from indexing.progress import Advance
from indexing.retrieval.queries import Retrieval
from indexing.retrieval.retriever import Retriever
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from indexing.store.settings import settings
from retro.evaluation.question_sets import Question

_BLOCK_QUESTIONS = 64


@settings
class RetrievalSettings:
    """Settings of a measurement of retrieval."""

    retrieval: Annotated[tuple[Retrieval, ...], Field(min_length=1)] = ("dense", "sparse", "hybrid")
    """Ways of retrieval to compare: by embeddings (`dense`), by terms (`sparse`), by both (`hybrid`)."""
    k: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1, 5, 20)
    """Values of k in hit@k and recall@k: number of documents to search for a right one."""
    chunks: int = 100
    """Chunks to find for each question; their documents are ranked. Use a few times the largest k."""
    max_questions: NonNegativeInt = 0
    """Use only the first n questions; 0 = all."""

    def __post_init__(self) -> None:
        if self.chunks < max(self.k):
            raise InputError(f"chunks = {self.chunks}: should be at least the largest k, {max(self.k)}.")


@dataclass(frozen=True)
class RetrievalResult:
    """Metrics of one way of retrieval.

    Attributes:
        retrieval: how chunks were found.
        num_questions: number of questions.
        hit: k → fraction of the questions with a right document among the first k.
        recall: k → mean fraction of a question's right documents among the first k.
        mrr: mean of 1 / rank of the first right document; 0 if none is found.
    """

    retrieval: Retrieval
    num_questions: int
    hit: dict[int, float]
    recall: dict[int, float]
    mrr: float


def right_documents(retrieval: RetrievalSet, questions: Sequence[Question]) -> list[np.ndarray]:
    """Return for each question the numbers [right] int64 (`RetrievalSet.documents_of`) of the documents with an answer.

    Raises:
        InputError: a question names no document, or no document of the datastore.
    """
    rows_by_name: dict[str, list[int]] = {name: [] for question in questions for name in question.positive_ids}
    for first, table in retrieval.scan_documents(["id"]):
        for row, name in enumerate(table["id"].to_pylist(), first):
            if name in rows_by_name:
                rows_by_name[name].append(row)
    right = []
    for question in questions:
        if not question.positive_ids:
            raise InputError(
                f'question {question.id!r} has no "positive_ids". Each question must name the documents with an answer: '
                '"positive_ids": ["id", …].'
            )
        documents = [document for name in question.positive_ids for document in rows_by_name[name]]
        if not documents:
            raise InputError(
                f'question {question.id!r}: the datastore has none of its "positive_ids" {list(question.positive_ids[:3])}. '
                "Build the datastore from the set's passages without held-out documents: corpus.split = [1, 0, 0]."
            )
        right.append(np.array(documents, dtype=np.int64))
    return right


def measure(
    retriever: Retriever,
    questions: Sequence[Question],
    right: Sequence[np.ndarray],
    retrieval: Retrieval,
    settings: RetrievalSettings,
    advance: Advance,
) -> RetrievalResult:
    """Search for all questions and compare the results with the right documents from `right_documents`."""
    ranks = []
    for start in range(0, len(questions), _BLOCK_QUESTIONS):
        block = slice(start, start + _BLOCK_QUESTIONS)
        ranked = retriever.chunks.rank(
            [question.question for question in questions[block]], settings.chunks, retrieval=retrieval
        )
        for ids, documents in zip(ranked.ids, right[block], strict=True):
            ranks.append(ranks_of(retriever.retrieval.documents_of(ids[ids >= 0]), documents))
        advance(len(ranked.ids))
    return summarize(retrieval, ranks, settings.k)


def ranks_of(documents: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the ranks [right] float64, from 1, of the right documents among those of the hits [n], which may repeat;
    +inf = not found."""
    order = list(dict.fromkeys(documents.tolist()))
    return np.array([order.index(document) + 1 if document in order else np.inf for document in right.tolist()])


def summarize(retrieval: Retrieval, ranks: Sequence[np.ndarray], ks: Sequence[int]) -> RetrievalResult:
    """Average the metrics over questions, from the ranks of their right documents."""
    return RetrievalResult(
        retrieval=retrieval,
        num_questions=len(ranks),
        hit={k: float(np.mean([(of_question <= k).any() for of_question in ranks])) for k in ks},
        recall={k: float(np.mean([(of_question <= k).mean() for of_question in ranks])) for k in ks},
        mrr=float(np.mean([1 / of_question.min() for of_question in ranks])),
    )
