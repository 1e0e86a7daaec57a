"""The code in the recipes of CONTRIBUTING.md runs and is correct."""

import gzip
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexing.corpus import documents, streams
from indexing.embedding import settings as embedding_settings
from indexing.index.exact_search import exact_search, in_ranges, recall, rerank
from indexing.index.floats import to_float32
from retro.device import choose_placement
from retro.model import positions
from tests.indexing.index.vector_files import stored
from tests.retro.inference.test_decoder import check_steps, retriever, rows, uncached
from tests.retro.small_model import M, T, Together, build

RECIPES = (Path(__file__).resolve().parents[1] / "CONTRIBUTING.md").read_text()


def defined(name: str, namespace: dict[str, Any]) -> Any:
    """Return the class or function that a recipe defines, evaluated with the names of the file it is added to."""
    blocks = re.findall(r"^ +```python\n(.*?)^ +```$", RECIPES, flags=re.DOTALL | re.MULTILINE)
    (code,) = (
        textwrap.dedent(block) for block in blocks if re.search(rf"^ +(class|def) {name}\b", block, re.MULTILINE)
    )
    exec(code, names := dict(namespace))
    return names[name]


def test_embedder_recipe_returns_unit_vectors_independent_of_padding() -> None:
    embedder = defined("BagEmbedder", vars(embedding_settings))(64, 0)
    tokens, lengths = np.array([[3, 4, 9], [3, 4, 7]], np.uint16), np.array([2, 2])
    vectors = embedder.embed(tokens, lengths)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.array_equal(vectors[0], vectors[1])


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_reader_recipe_returns_the_requested_rows(tmp_path: Path, suffix: str) -> None:
    texts = defined("fortunes", vars(documents) | vars(streams) | {"itertools": itertools, "Iterator": Iterator})
    data = b"a\nb\n%\nx\n%\ny\n"
    (tmp_path / "d").write_bytes(gzip.compress(data) if suffix else data)
    file = documents.CorpusFile(str(tmp_path / "d"), f"d.fortune{suffix}", len(data))

    def read(start: int, stop: int | None) -> list[str]:
        request = documents.ReadRequest(file, documents.CorpusSettings(), pytest.fail, start, stop)
        with (gzip.open if suffix else open)(file.path, "rb") as stream:
            return [document.text for document in texts(stream, request)]

    assert read(0, None) == ["a\nb\n", "x\n", "y\n"]
    assert read(1, 2) == ["x\n"]


def test_search_recipe_finds_neighbors_and_omits_excluded_chunks(tmp_path: Path) -> None:
    embeddings = stored(tmp_path, np.random.default_rng(0).standard_normal((500, 8)))
    queries, own = embeddings.read(0, 50).astype(np.float32), (np.arange(50), np.arange(50) + 1)
    graph = defined(
        "GraphIndex",
        {"np": np, "to_float32": to_float32, "in_ranges": in_ranges, "ShardedArray": object, "IdRanges": object},
    )
    ids = graph(embeddings, (0, 500)).search(queries, 21, own)
    assert not (ids == own[0][:, None]).any()
    found, exact = rerank(queries, ids, embeddings)[0][:, :10], exact_search(queries, embeddings, 10, own)[0]
    assert recall(found, exact) > 0.9


def test_positions_recipe_gives_the_same_logits_in_generation_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(positions.SCHEMES, "alibi", defined("LogPositions", vars(positions)))
    model, retrieve = build(**{"attention.positions": "alibi"}), retriever(2)
    decoder = Together(model, choose_placement("cpu", "float32"), 4 * T, retrieve)
    check_steps(decoder, lambda row, _: uncached(model, row, retrieve), rows(1, M, 2 * M + 1), M + 1)
