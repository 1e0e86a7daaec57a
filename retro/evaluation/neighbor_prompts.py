"""Prompts for question answering with passages as neighbors (paper, section 4.3): questions and passages → token
arrays.

    question ─► "question: …⏎answer:", padded in front to whole chunks ─► the prompt; its last chunk retrieves
    passages ─► "title: …, source: …", each truncated to r = 2m tokens ─► neighbors of the prompt's chunks
    answer   ─► " …" and the end of the document                       ─► the text after the prompt: learned or generated

A passage is a retrieved chunk with its continuation, like every neighbor, after the title of its document. In Chinese
the words are 问题：…⏎答案：, and 标题：…，来源：…

The paper pads on the left. Here the padding consists of line ends after the beginning-of-document token, because
pretraining never reads padding tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from indexing.progress import Advance
from indexing.retrieval.queries import Retrieval
from indexing.retrieval.retriever import Retriever
from indexing.store.retrieval_set import CHUNK_ID_BITS, RetrievalSet, neighbor_ids
from indexing.tokenization.language import Language
from indexing.tokenization.tokenizer import Tokenizer
from retro.evaluation.question_sets import Question
from retro.evaluation.retrieval_metrics import right_documents

_BLOCK_QUESTIONS = 256  # searched together


class NeighborTemplate(NamedTuple):
    """Formats of questions, answers and passages in one language."""

    question: str
    answer: str
    title: str
    source: str


NEIGHBOR_TEMPLATES: dict[Language, NeighborTemplate] = {
    "en": NeighborTemplate("question: {}\nanswer:", " {}", "title: {}, ", "source: {}"),
    "zh": NeighborTemplate("问题：{}\n答案：", "{}", "标题：{}，", "来源：{}"),
}


class NeighborPassage(NamedTuple):
    """A passage to read as a neighbor; the title may be empty."""

    title: str
    text: str


@dataclass(frozen=True)
class QuestionFormat:
    """Converts questions, answers and passages of one language to tokens.

    Attributes:
        tokenizer: the model's tokenizer.
        chunk_length: m.
        language: language of the templates in `NEIGHBOR_TEMPLATES`.
    """

    tokenizer: Tokenizer
    chunk_length: int
    language: Language = "en"

    def prompt(self, question: str) -> np.ndarray:
        """Return the prompt [u · m] int64 in whole chunks: beginning of the document, padding, question, "answer:"."""
        tokens = self.tokenizer.encode(self.template.question.format(question))
        line_end = self.tokenizer.encode("\n")[-1]
        fill = -(1 + len(tokens)) % self.chunk_length
        return np.concatenate(([self.tokenizer.bos_id], np.full(fill, line_end), tokens)).astype(np.int64)

    def answer(self, text: str) -> np.ndarray:
        """Return the tokens [t] int64 of an answer after the prompt, with the end of the document."""
        before = self.template.question.format("").split("\n")[-1]
        return np.append(continuation(self.tokenizer, before, self.template.answer.format(text)), self.tokenizer.eos_id)

    def neighbors(self, passages: Sequence[NeighborPassage], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the first k passages as neighbors: tokens [k, 2m] int64 and lengths [k] int64; 0 = no passage."""
        tokens = np.full((k, 2 * self.chunk_length), self.tokenizer.pad_id, dtype=np.int64)
        lengths = np.zeros(k, dtype=np.int64)
        texts = [self._written(passage) for passage in passages[:k]]
        for row, encoded in enumerate(self.tokenizer.encode_batch(texts) if texts else ()):
            lengths[row] = min(len(encoded), tokens.shape[1])
            tokens[row, : lengths[row]] = encoded[: lengths[row]]
        return tokens, lengths

    @property
    def template(self) -> NeighborTemplate:
        """Formats in the language."""
        return NEIGHBOR_TEMPLATES[self.language]

    def _written(self, passage: NeighborPassage) -> str:
        title = self.template.title.format(passage.title) if passage.title else ""
        return title + self.template.source.format(passage.text)


def continuation(tokenizer: Tokenizer, before: str, text: str) -> np.ndarray:
    """Return the tokens [t] int64 of a text that follows another text.

    Encodes both together if this keeps the tokens of the first text, because some tokenizers put a space in front of
    every text.
    """
    start, whole = tokenizer.encode(before), tokenizer.encode(before + text)
    keeps_start = np.array_equal(whole[: len(start)], start)
    return (whole[len(start) :] if keeps_start else tokenizer.encode(text)).astype(np.int64)


def find_neighbor_passages(
    retriever: Retriever,
    questions: Sequence[Question],
    k: int,
    *,
    retrieval: Retrieval = "dense",
    positives_first: bool = False,
    advance: Advance = lambda _: None,
) -> list[list[NeighborPassage]]:
    """Find k passages for each question, best first; fewer if the datastore has fewer.

    Args:
        retriever: retriever of a datastore of passages.
        questions: their texts are the queries.
        k: number of passages for each question.
        retrieval: how passages are found.
        positives_first: put the documents in the question's `positive_ids` first, from their beginning, whether found
            or not.
        advance: called with numbers of processed questions.

    Raises:
        InputError: a question is empty, or `positives_first` is set and a question names no document of the datastore.
    """
    right = right_documents(retriever.retrieval, questions) if positives_first else None
    passages: list[list[NeighborPassage]] = []
    for start in range(0, len(questions), _BLOCK_QUESTIONS):
        block = slice(start, start + _BLOCK_QUESTIONS)
        ranked = retriever.chunks.rank([question.question for question in questions[block]], k, retrieval=retrieval).ids
        rows = [row[row >= 0] for row in ranked]
        if right is not None:
            rows = [_led_by(retriever.retrieval, *pair)[:k] for pair in zip(right[block], rows, strict=True)]
        passages += _texts(retriever, rows)
        advance(len(rows))
    return passages


def _led_by(retrieval: RetrievalSet, documents: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Put every second chunk of the documents [d] in front of chunk ids [n]: each chunk comes with its continuation."""
    first = []
    for datastore_index, document in zip(
        documents >> CHUNK_ID_BITS, documents & ((1 << CHUNK_ID_BITS) - 1), strict=True
    ):
        start, stop = retrieval.splits[datastore_index].chunk_range(int(document))
        first.append(neighbor_ids(int(datastore_index), np.arange(start, stop, 2)))
    others = ids[~np.isin(retrieval.documents_of(ids), documents)]
    return np.concatenate([*first, others])


def _texts(retriever: Retriever, rows: Sequence[np.ndarray]) -> list[list[NeighborPassage]]:
    """Return the passages of each row of chunk ids [n]."""
    ids = np.concatenate(rows)
    hits = retriever.lookup.hits(ids, np.zeros(len(ids), dtype=np.float32))
    # A chunk can begin or end inside a character.
    passages = (NeighborPassage(hit.title, (hit.text + hit.continuation).strip("\ufffd \n")) for hit in hits)
    return [[next(passages) for _ in row] for row in rows]
