"""Questions end with a chunk, passages are neighbors of r tokens, and positives come first on request."""

import numpy as np
import pytest

from indexing.retrieval.retriever import Retriever
from indexing.tokenization.language import Language
from indexing.tokenization.tokenizer import Tokenizer
from retro.evaluation.neighbor_prompts import NeighborPassage, QuestionFormat, find_neighbor_passages
from retro.evaluation.question_sets import Question

M = 16


@pytest.fixture(scope="module")
def tokenizer(retriever: Retriever) -> Tokenizer:
    return retriever.tokenizer


@pytest.mark.parametrize("question", ["why?", "which of the many layers of this index is the one that is read first?"])
@pytest.mark.parametrize(
    ("language", "words"), [("en", "question: {}\nanswer:"), ("zh", "问题：{}\n答案：")], ids=["en", "zh"]
)
def test_a_prompt_fills_whole_chunks_and_the_answer_follows_it(
    tokenizer: Tokenizer, language: Language, words: str, question: str
) -> None:
    form = QuestionFormat(tokenizer, M, language)
    prompt = form.prompt(question)
    assert prompt[0] == tokenizer.bos_id
    assert len(prompt) % M == 0
    text = tokenizer.decode(prompt)
    assert text.lstrip("\n") == words.format(question)
    assert len(prompt) - len(tokenizer.encode(text.lstrip("\n"))) <= M  # no chunk consists of padding only
    answer = form.answer("the second 第二")
    assert answer[-1] == tokenizer.eos_id
    assert tokenizer.decode(answer) == ("" if language == "zh" else " ") + "the second 第二"


def test_passages_are_cut_to_two_chunks_and_missing_ones_are_empty(tokenizer: Tokenizer) -> None:
    tokens, lengths = QuestionFormat(tokenizer, M).neighbors(
        [NeighborPassage("A title", "word " * 50), NeighborPassage("", "短")], 3
    )
    assert tokens.shape == (3, 2 * M)
    assert tokenizer.decode(tokens[0]).startswith("title: A title, source: word word")
    assert lengths.tolist() == [2 * M, len(tokenizer.encode("source: 短")), 0]
    assert (tokens[2] == tokenizer.pad_id).all()
    chinese, (length,) = QuestionFormat(tokenizer, M, "zh").neighbors([NeighborPassage("书", "文")], 1)
    assert tokenizer.decode(chinese[0, :length]) == "标题：书，来源：文"


def test_passages_are_the_retrieved_chunks_with_whole_positive_documents_first(retriever: Retriever) -> None:
    split = retriever.retrieval.own
    (row,) = split.metadata([40])
    question = Question("q", "model layers and the training of an index", (), (row["id"],))
    found = find_neighbor_passages(retriever, [question], 4)[0]
    hits = retriever.search([question.question], 4).hits[0]
    assert found == [NeighborPassage(hit.title, (hit.text + hit.continuation).strip("\ufffd \n")) for hit in hits]
    given = find_neighbor_passages(retriever, [question, question], 200, positives_first=True)
    assert given[0] == given[1]
    first, stop = split.chunk_range(40)
    own = -(-(stop - first) // 2)
    document = retriever.tokenizer.decode(split.tokens.gather(np.arange(first, stop)).ravel())
    assert "".join("".join(passage.text for passage in given[0][:own]).split()) == "".join(document.split())
    assert {passage.title for passage in given[0][:own]} == {row["title"]}
    assert row["title"] not in {passage.title for passage in given[0][own:]}
