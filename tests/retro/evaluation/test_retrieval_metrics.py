"""hit@k, recall@k and MRR over documents, each ranked by its best chunk."""

import numpy as np
import pytest

from indexing.retrieval.queries import Retrieval
from indexing.retrieval.retriever import Retriever
from indexing.store.errors import InputError
from indexing.store.retrieval_set import CHUNK_ID_BITS
from retro.evaluation.question_sets import Question
from retro.evaluation.retrieval_metrics import RetrievalSettings, measure, ranks_of, right_documents, summarize


def test_a_document_is_ranked_by_its_best_chunk() -> None:
    ranks = ranks_of(np.array([7, 7, 3, 7, 9, 3]), np.array([9, 7, 4]))
    assert ranks.tolist() == [3, 1, np.inf]


def test_metrics_are_means_over_questions() -> None:
    ranks = [np.array([1.0, 4.0]), np.array([2.0]), np.array([np.inf, np.inf])]
    result = summarize("sparse", ranks, (1, 2, 5))
    assert result.hit == pytest.approx({1: 1 / 3, 2: 2 / 3, 5: 2 / 3})
    assert result.recall == pytest.approx({1: 0.5 / 3, 2: 1.5 / 3, 5: 2 / 3})
    assert result.mrr == pytest.approx((1 + 1 / 2) / 3)
    assert (result.retrieval, result.num_questions) == ("sparse", 3)


def test_positive_documents_are_found_by_id(retriever: Retriever) -> None:
    split = retriever.retrieval.own
    rows = split.metadata(range(split.num_documents))
    asked = [
        Question("a", "?", (), (rows[7]["id"], "nobody")),
        Question("b", "?", (), (rows[150]["id"], rows[3]["id"])),
    ]
    assert [each.tolist() for each in right_documents(retriever.retrieval, asked)] == [[7], [150, 3]]
    first = split.chunk_range(150)[0]
    assert retriever.retrieval.documents_of(np.array([first, 0])).tolist() == [150, 0]
    assert next(number >> CHUNK_ID_BITS for number, _ in retriever.retrieval.scan_documents(["id"])) == 0


@pytest.mark.parametrize(
    ("positive_ids", "words"),
    [
        (("nobody",), r"'q'.*\"positive_ids\" \['nobody'\]"),
        ((), "'q'.*\"positive_ids\""),
    ],
)
def test_questions_without_positive_documents_are_rejected(retriever: Retriever, positive_ids, words: str) -> None:
    with pytest.raises(InputError, match=words):
        right_documents(retriever.retrieval, [Question("q", "?", (), positive_ids)])


@pytest.mark.parametrize("way", ["dense", "sparse", "hybrid"])
def test_documents_are_found_by_their_own_text_only(retriever: Retriever, way: Retrieval) -> None:
    split = retriever.retrieval.own
    numbers = list(range(0, split.num_documents, 9))
    rows = split.metadata(numbers)
    first = split.chunk_ranges(np.array(numbers))[:, 0]
    tokens, lengths = split.tokens.gather(first), split.lengths.gather(first)
    texts = [retriever.tokenizer.decode(row[:length]) for row, length in zip(tokens, lengths, strict=True)]
    asked = [Question(str(n), text, (), (row["id"],)) for n, (text, row) in enumerate(zip(texts, rows, strict=True))]
    right, settings = right_documents(retriever.retrieval, asked), RetrievalSettings(k=(1, 5), chunks=30)
    done: list[int] = []
    result = measure(retriever, asked, right, way, settings, done.append)
    assert result.hit[1] > 0.8
    assert sum(done) == result.num_questions == len(asked)
    assert result.hit[1] <= result.mrr <= result.hit[5] + (1 - result.hit[5]) / 6
    wrong = measure(retriever, asked, [each + 1 for each in right], way, settings, done.append)
    assert wrong.hit[1] < 0.2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"k": ()}, r"k = \[\]"),
        ({"k": (0,)}, r"k\[0\] = 0"),
        ({"k": (200,)}, "chunks = 100"),
        ({"retrieval": ()}, r"retrieval = \[\]"),
    ],
)
def test_empty_or_inconsistent_settings_are_rejected(settings, words: str) -> None:
    with pytest.raises(InputError, match=words):
        RetrievalSettings(**settings)
