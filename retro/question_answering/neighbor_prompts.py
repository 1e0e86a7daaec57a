"""Question answering with passages as neighbors (paper, section 4.3): questions and passages → token arrays.

    question ─► "question: …⏎answer:", filled up in front to whole chunks ─► the last of them retrieves
    passages ─► "title: …, source: …", each cut to r = 2m tokens          ─► neighbors of the question's chunks
    answer   ─► " …" and the end of the document                          ─► what follows the prompt: learned, or generated

A passage is a retrieved chunk with its continuation, as every neighbor is, with the title of its document in front. In
Chinese the words are 问题：…⏎答案：, and 标题：…，来源：…

The paper pads on the left; here line ends follow the beginning of the document, as many as fill the first chunk: a padding
token is one that pretraining has never read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from indexing.retrieval.results import Rerank
from indexing.retrieval.retriever import Retriever
from indexing.store.retrieval_set import CHUNK_ID_BITS, RetrievalSet, neighbor_ids
from indexing.tokenization.tokenizer import Tokenizer
from retro.question_answering.answer_metrics import Language
from retro.question_answering.question_sets import Question
from retro.question_answering.retrieval_metrics import right_documents

_BLOCK_QUESTIONS = 256  # searched together


class Words(NamedTuple):
    """The words around questions, answers and passages in one language."""

    question: str
    answer: str
    title: str
    source: str


WORDS: dict[Language, Words] = {
    "en": Words("question: {}\nanswer:", " {}", "title: {}, ", "source: {}"),
    "zh": Words("问题：{}\n答案：", "{}", "标题：{}，", "来源：{}"),
}


class Passage(NamedTuple):
    """What stands in a neighbor; the title may be empty."""

    title: str
    text: str


@dataclass(frozen=True)
class Format:
    """How questions, answers and passages of one language become tokens.

    Attributes:
        tokenizer: the model's.
        chunk_length: m.
        language: of the words between.
    """

    tokenizer: Tokenizer
    chunk_length: int
    language: Language = "en"

    def prompt(self, question: str) -> np.ndarray:
        """The question's whole chunks [u · m] int64, the beginning of the document first; "answer:" ends the last one."""
        asked = self.tokenizer.encode(self.words.question.format(question))
        line_end = self.tokenizer.encode("\n")[-1]
        fill = -(1 + len(asked)) % self.chunk_length
        return np.concatenate(([self.tokenizer.bos_id], np.full(fill, line_end), asked)).astype(np.int64)

    def answer(self, text: str) -> np.ndarray:
        """What follows the prompt [t] int64, the end of the document last."""
        before = self.words.question.format("").split("\n")[-1]
        return np.append(continuation(self.tokenizer, before, self.words.answer.format(text)), self.tokenizer.eos_id)

    def neighbors(self, passages: Sequence[Passage], k: int) -> tuple[np.ndarray, np.ndarray]:
        """The first k passages as neighbors: tokens [k, 2m] int64, and lengths [k] int64, 0 where there are fewer."""
        tokens = np.full((k, 2 * self.chunk_length), self.tokenizer.pad_id, dtype=np.int64)
        lengths = np.zeros(k, dtype=np.int64)
        texts = [self._written(passage) for passage in passages[:k]]
        for row, encoded in enumerate(self.tokenizer.encode_batch(texts) if texts else ()):
            lengths[row] = min(len(encoded), tokens.shape[1])
            tokens[row, : lengths[row]] = encoded[: lengths[row]]
        return tokens, lengths

    @property
    def words(self) -> Words:
        """Of its language."""
        return WORDS[self.language]

    def _written(self, passage: Passage) -> str:
        title = self.words.title.format(passage.title) if passage.title else ""
        return title + self.words.source.format(passage.text)


def continuation(tokenizer: Tokenizer, before: str, text: str) -> np.ndarray:
    """Tokens [t] int64 of a text that follows another, whose tokens are written already.

    As both together are encoded, where the first keeps its tokens: some tokenizers put a blank before all that they are given.
    """
    start, whole = tokenizer.encode(before), tokenizer.encode(before + text)
    goes_on = np.array_equal(whole[: len(start)], start)
    return (whole[len(start) :] if goes_on else tokenizer.encode(text)).astype(np.int64)


def find_passages(
    retriever: Retriever,
    questions: Sequence[Question],
    k: int,
    *,
    rerank: Rerank = "embeddings",
    positives_first: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> list[list[Passage]]:
    """The k passages found for each question, best first; fewer where the datastore has no more.

    Args:
        retriever: of a datastore of the passages.
        questions: whose text is searched for.
        k: passages of each.
        rerank: what candidates are ordered by.
        positives_first: let those stand first that the question names, from their beginning on, found or not.
        advance: told of questions.

    Raises:
        InputError: `positives_first`, and a question names no document that is searched; or a question is empty.
    """
    right = right_documents(retriever.retrieval, questions) if positives_first else None
    found: list[list[Passage]] = []
    for start in range(0, len(questions), _BLOCK_QUESTIONS):
        block = slice(start, start + _BLOCK_QUESTIONS)
        ranked = retriever.rank([each.question for each in questions[block]], k, rerank=rerank).ids
        rows = [row[row >= 0] for row in ranked]
        if right is not None:
            rows = [_led_by(retriever.retrieval, *each)[:k] for each in zip(right[block], rows, strict=True)]
        found += _texts(retriever, rows)
        advance(len(rows))
    return found


def _led_by(retrieval: RetrievalSet, documents: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Chunk ids [n] with those of some documents [d] in front, every second one: each comes with the next."""
    first = []
    for number, document in zip(documents >> CHUNK_ID_BITS, documents & ((1 << CHUNK_ID_BITS) - 1), strict=True):
        start, stop = retrieval.splits[number].chunk_range(int(document))
        first.append(neighbor_ids(int(number), np.arange(start, stop, 2)))
    others = ids[~np.isin(retrieval.documents_of(ids), documents)]
    return np.concatenate([*first, others])


def _texts(retriever: Retriever, rows: Sequence[np.ndarray]) -> list[list[Passage]]:
    """The passages that chunk ids [n] of each row name."""
    ids = np.concatenate(rows)
    hits = retriever.hits(ids, np.zeros(len(ids), dtype=np.float32))
    # A chunk may begin or end inside a character.
    passages = (Passage(hit.title, (hit.text + hit.continuation).strip("\ufffd \n")) for hit in hits)
    return [[next(passages) for _ in row] for row in rows]
