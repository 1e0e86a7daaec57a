"""Conversations with passages in the prompt, one way for server, command line and evaluation.

messages ─► queries_of ─► `Retriever.passages` ─► numbered, before the last question ─► chat template ─► prompt
                                  └► passages_as_neighbors ─► their chunks, which the model reads and copies from as neighbors

A passage is text: the template sees a mark in place of the message (`chat_template.py`), and the message is encoded
without control tokens. Only the last question has passages, so a document that is deleted is gone from the next answer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from indexing.retrieval.results import Passage
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from indexing.tokenization.language import Language, language_of
from retro.inference.chat_template import ChatTemplate, Message

ANSWER_TOKENS = 256
"""Tokens that passages leave for an answer without a limit of its own."""
MOST_NEIGHBORS = 16
"""Default: the largest number of neighbors that passages become."""

_PROMPTS: dict[Language, str] = {
    "en": "Answer the question with the help of these passages.\n\n{passages}\n\nQuestion: {question}",
    "zh": "根据以下段落回答问题。\n\n{passages}\n\n问题：{question}",
}


@dataclass(frozen=True)
class PassagePrompt:
    """A conversation as tokens.

    Attributes:
        tokens: [t] int64, after which the answer begins.
        passages: in the prompt, numbered from 1 in this order.
        inserted: [start, stop) of the tokens that earn no trust in copying: from the first earlier answer, or else the
            first passage, to the last passage. An answer that was copied would be copied again.
    """

    tokens: np.ndarray
    passages: list[Passage]
    inserted: tuple[int, int] = (0, 0)


def queries_of(messages: Sequence[Message]) -> tuple[str, ...]:
    """What is searched for a conversation: the last question, and the one before it, because "who wrote it?" names
    nothing.

    Raises:
        InputError: no message of the user has text.
    """
    asked = [message.content for message in messages if message.role == "user" and message.content.strip()]
    if not asked:
        raise InputError("no message of the user has text to search passages for.")
    return tuple(reversed(asked[-2:]))


def room_for_prompt(context: int, max_tokens: int) -> int:
    """The largest number of tokens of a prompt with passages that leaves room for an answer, at most half of the
    context."""
    return context - min(max_tokens, context // 2)


def write_prompt(
    template: ChatTemplate, messages: Sequence[Message], plain: np.ndarray, passages: Sequence[Passage], most: int
) -> PassagePrompt:
    """Write a conversation with passages before its last question.

    Args:
        template: of the model.
        messages: the last one of the user is the question.
        plain: [t] int64, the prompt without passages.
        passages: best first. The last ones are left out if the prompt would be too long.
        most: largest number of tokens.
    """
    for count in range(len(passages), 0, -1):
        tokens = template.prompt(_with_passages(messages, passages[:count]))
        if len(tokens) <= most:
            start, stop = _added(plain, tokens)
            return PassagePrompt(
                tokens, list(passages[:count]), (int(min(start, _first_answer(template, messages))), stop)
            )
    return PassagePrompt(plain, [])


def _first_answer(template: ChatTemplate, messages: Sequence[Message]) -> int | float:
    """The number of tokens before the first answer of the conversation; infinity if there is none."""
    first = next((index for index, message in enumerate(messages) if message.role == "assistant"), None)
    if first is None:
        return math.inf
    return len(template.prompt(messages[:first])) if first else 0


def _with_passages(messages: Sequence[Message], passages: Sequence[Passage]) -> list[Message]:
    """The messages, with numbered passages in the last one of the user."""
    last = max(index for index, message in enumerate(messages) if message.role == "user")
    question = messages[last].content
    texts = [
        "\n".join(filter(None, (f"[{number}] {passage.title}".rstrip(), passage.text)))
        for number, passage in enumerate(passages, 1)
    ]
    content = _PROMPTS[language_of([question])].format(passages="\n\n".join(texts), question=question)
    return [*messages[:last], Message("user", content), *messages[last + 1 :]]


def _added(before: np.ndarray, after: np.ndarray) -> tuple[int, int]:
    """The tokens [start, stop) of the second row that are between the beginning and the end that both have."""
    length = min(len(before), len(after))
    start = _equal(before[:length], after[:length])
    rest = length - start
    return start, len(after) - (_equal(before[::-1][:rest], after[::-1][:rest]) if rest else 0)


def _equal(first: np.ndarray, second: np.ndarray) -> int:
    """How many tokens at the beginning of two rows [n] are equal."""
    differ = np.flatnonzero(first != second)
    return int(differ[0]) if len(differ) else len(first)


def passages_as_neighbors(
    retrieval: RetrievalSet, passages: Sequence[Passage], most: int = MOST_NEIGHBORS
) -> tuple[np.ndarray, ...]:
    """The chunks of passages as neighbors that all chunks of a prompt read, for `LanguageModel.generate`.

    Args:
        retrieval: that the passages are from.
        passages: best first.
        most: largest number K of neighbors. Each has two chunks.

    Returns:
        tokens [K, 2m] int64, lengths [K] int64, ids [K] int64, distances [K] float32, which are unknown: NaN. Without
        passages one neighbor that is missing: id -1, length 0.
    """
    m = retrieval.own.chunk_length
    starts = [(start, passage) for passage in passages for start in range(0, passage.num_chunks, 2)][:most]
    ids = np.array([passage.chunk_id + start for start, passage in starts] or [-1], dtype=np.int64)
    tokens, lengths = retrieval.with_continuation(ids)
    alone = np.array([start + 1 == passage.num_chunks for start, passage in starts] or [False], dtype=bool)
    lengths = np.where(alone, np.minimum(lengths, m), lengths)  # the continuation is not in the passage
    return tokens, lengths, ids, np.full(len(ids), np.nan, dtype=np.float32)
