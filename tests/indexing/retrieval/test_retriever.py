"""The retriever searches by texts, tokens or vectors, in one or several datastores, from any thread."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from indexing.index.floats import to_float32
from indexing.retrieval.candidates import PartsMissing
from indexing.retrieval.queries import Retrieval
from indexing.retrieval.results import Hit
from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import CHUNK_ID_BITS
from tests.conftest import build_local, tiny_config, write_corpus

RETRIEVALS = get_args(Retrieval)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, tiny_datastore: Datastore) -> Datastore:
    """A datastore of other documents with the same tokenizer and embedder, and one more column."""
    folder = tmp_path_factory.mktemp("other")
    config = tiny_config(folder, write_corpus(folder / "corpus.jsonl", 60, seed=5))
    return build_local(
        replace(
            config,
            tokenizer=replace(
                config.tokenizer,
                kind="sentencepiece",
                path=str(tiny_datastore.folder / "tokenizer" / "sentencepiece.model"),
            ),
            embedder=replace(config.embedder, path=str(tiny_datastore.folder)),
            corpus=replace(config.corpus, metadata_keys=("title", "lang")),
        )
    )


def text_of(retriever: Retriever, chunk: int) -> str:
    own, rows = retriever.retrieval.own, np.array([chunk])
    return retriever.tokenizer.decode(own.tokens.gather(rows)[0, : own.lengths.gather(rows)[0]])


def chunk_ids(hits: list[Hit]) -> list[int]:
    return [hit.chunk_id for hit in hits]


def test_texts_tokens_and_vectors_find_the_same_chunks(retriever: Retriever) -> None:
    texts = [text_of(retriever, chunk) for chunk in (3, 77, 200)]
    by_text = retriever.search(texts, 4)
    rows = retriever.tokenizer.encode_batch(texts)
    assert retriever.search(rows, 4) == by_text
    vectors = retriever.queries.vectors(texts)
    assert [chunk_ids(hits) for hits in retriever.search(7 * vectors.astype(np.float64), 4).hits] == [
        chunk_ids(hits) for hits in by_text.hits
    ]
    assert by_text.missing == ()


@pytest.mark.parametrize("way", RETRIEVALS)
def test_hits_are_sorted_by_score_and_contain_the_stored_text(retriever: Retriever, way: Retrieval) -> None:
    split = retriever.retrieval.own
    query = text_of(retriever, 61)
    hits = retriever.search([query], 12, retrieval=way).hits[0]
    assert len(hits) == 12
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert hits[0].text == query  # the text of this chunk, or of another with equal text
    for hit in hits:
        stored = retriever.lookup.chunk(hit.chunk_id)
        assert (hit.text, hit.continuation, hit.metadata) == (stored.text, stored.continuation, stored.metadata)
        assert hit.metadata == split.metadata(split.documents_of(np.array([hit.chunk_id]))[0].tolist())[0]
        assert (hit.document_id, hit.title, hit.source) == (hit.metadata["id"], hit.metadata["title"], "")
        vectors = to_float32(split.embeddings.gather(np.array([hit.chunk_id])))
        assert hit.distance == pytest.approx(((vectors - retriever.queries.vectors([query])) ** 2).sum(), abs=2e-3)


def test_several_datastores_are_searched_as_one(
    tiny_datastore: Datastore, other: Datastore, retriever: Retriever
) -> None:
    both = Retriever.open(tiny_datastore.folder, other.folder)
    alone = Retriever.open(other.folder)
    queries = [text_of(alone, 30), text_of(retriever, 30)]
    # Other chunks have the same words.
    titles = [each.lookup.chunk(30).metadata["title"] + " " for each in (alone, retriever)]
    for way, before in (("dense", ["", ""]), ("sparse", titles), ("hybrid", titles)):
        hits = both.search([title + query for title, query in zip(before, queries, strict=True)], 8, retrieval=way).hits
        assert [of_query[0].text for of_query in hits] == queries, way
    ids = [np.array(chunk_ids(each)) for each in both.search(queries, 8).hits]
    assert set((ids[0] >> CHUNK_ID_BITS).tolist()) | set((ids[1] >> CHUNK_ID_BITS).tolist()) == {0, 1}
    vectors = both.queries.vectors(queries)
    near = np.sort(np.concatenate([each.chunks.nearest(vectors, 8)[1] for each in (retriever, alone)], axis=1))[:, :8]
    np.testing.assert_allclose(both.chunks.nearest(vectors, 8)[1], near, atol=1e-6)
    theirs = next(hit for hits in both.search(queries, 8).hits for hit in hits if hit.chunk_id >> CHUNK_ID_BITS)
    stored = both.lookup.chunk(theirs.chunk_id)
    assert (stored.text, stored.metadata) == (theirs.text, theirs.metadata)
    assert "lang" not in both.filters.columns
    assert "lang" in alone.filters.columns
    found = both.search(queries, 500, filters={"title": "Title 7"}).hits[0]
    assert {hit.chunk_id >> CHUNK_ID_BITS for hit in found} == {0, 1}
    assert Retriever.open(tiny_datastore.folder, tiny_datastore.folder).retrieval == retriever.retrieval


def test_incompatible_datastores_are_refused(tiny_datastore: Datastore, tmp_path: Path) -> None:
    strange = build_local(tiny_config(tmp_path, write_corpus(tmp_path / "c.jsonl", 20, seed=9)))
    with pytest.raises(InputError, match=r"different tokenizers"):
        Retriever.open(tiny_datastore.folder, strange.folder)


def test_empty_batch_of_queries_returns_no_hits(retriever: Retriever) -> None:
    for way in RETRIEVALS:
        assert retriever.search([], 3, retrieval=way).hits == []


def test_batch_finds_the_same_hits_as_single_queries(retriever: Retriever) -> None:
    queries = [text_of(retriever, chunk) for chunk in range(0, 200, 7)]
    for way in RETRIEVALS:
        together = retriever.search(queries, 5, retrieval=way).hits
        assert [chunk_ids(hits) for hits in together] == [
            chunk_ids(retriever.search([query], 5, retrieval=way).hits[0]) for query in queries
        ]


def test_several_threads_can_search_at_once(tiny_datastore: Datastore, retriever: Retriever) -> None:
    queries = [text_of(retriever, chunk) for chunk in range(0, 96, 4)]
    options = [{"retrieval": way, "filters": filters} for way in RETRIEVALS for filters in (None, {"title": "Title 3"})]
    expected = [[retriever.search([query], 3, **each) for query in queries] for each in options]
    fresh = Retriever.open(tiny_datastore.folder)  # its caches are empty
    with ThreadPoolExecutor(8) as pool:
        found = [[pool.submit(fresh.search, [query], 3, **each) for query in queries] for each in options]
        assert [[future.result() for future in row] for row in found] == expected


def test_missing_index_parts_are_named_in_the_results(tiny_datastore: Datastore, retriever: Retriever) -> None:
    class Partly:
        num_vectors = retriever.indexes[0].num_vectors

        def search(self, queries: np.ndarray, k: int) -> np.ndarray:
            raise PartsMissing(["shard 2"], np.where((ids := retriever.indexes[0].search(queries, k)) < 50, ids, -1))

    partly = Retriever.open(tiny_datastore.folder, indexes=[Partly()])
    results = partly.search([text_of(retriever, 10)], 3)
    assert results.missing == ("shard 2",)
    assert results.hits[0][0].text == text_of(retriever, 10)
    assert all(hit.chunk_id < 50 for hit in results.hits[0])


def test_a_truncated_file_is_refused_by_name_unless_search_does_not_read_it(
    tiny_datastore: Datastore, retriever: Retriever, tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_datastore.folder, folder)
    query, refused = [text_of(retriever, 5)], set()
    wanted = retriever.search(query, 3, retrieval="hybrid")
    parts = ("chunks", "embedder", "embeddings", "index", "sparse", "tokenizer")
    files = [path for part in parts for path in sorted((folder / part).rglob("*")) if path.is_file()]
    for file in (path for path in files if not re.search("/0000[1-9]/", str(path))):  # of the first shard
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        try:
            found, error = Retriever.open(folder).search(query, 3, retrieval="hybrid"), ""
        except InputError as refusal:
            found, error = None, str(refusal)
            refused.add(file.name)
        assert found == wanted or file.name in error
        file.write_bytes(whole)
    assert refused >= {
        "embedder.json",
        "weights.npy",
        "tuned.json",
        "meta.json",
        "token_bytes.npy",
        "chunks-0.idx",
        "vectors.faiss",
    }


def test_a_stage_is_required_only_by_what_reads_it(copying_datastore: Datastore, retriever: Retriever) -> None:
    opened, query = Retriever.open(copying_datastore.folder), ["memory of a chunk"]
    assert opened.chunks.ways == ("sparse",)
    assert retriever.chunks.ways == ("dense", "sparse", "hybrid")
    chunks = [
        opened.chunks.rank(query, 5, retrieval="sparse").ids,
        retriever.chunks.rank(query, 5, retrieval="sparse").ids,
    ]
    np.testing.assert_array_equal(*chunks)
    assert opened.lookup.chunk(0) == retriever.lookup.chunk(0)
    opened.chunks.require("sparse")
    for act in (
        lambda: opened.chunks.require("hybrid"),
        lambda: opened.search(query, 2),
        lambda: opened.queries,
        lambda: opened.indexes,
    ):
        with pytest.raises(InputError, match="no finished 'add' stage"):
            act()
