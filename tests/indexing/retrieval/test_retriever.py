"""The retriever searches by texts, tokens or vectors, in one or several datastores, by any ranking, from any thread."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from indexing.index.exact_search import exact_search
from indexing.index.floats import to_float32
from indexing.retrieval.candidates import PartsMissing
from indexing.retrieval.results import Hit
from indexing.retrieval.retriever import Retriever
from indexing.sparse.candidates import Retrieval
from indexing.store.datastore import Datastore, delete_documents, read_datastore_manifest, write_datastore_manifest
from indexing.store.errors import InputError, NotFound
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
    vectors = retriever.embed(texts)
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
        stored = retriever.chunk(hit.chunk_id)
        assert (hit.text, hit.continuation, hit.metadata) == (stored.text, stored.continuation, stored.metadata)
        assert hit.metadata == split.metadata(split.documents_of(np.array([hit.chunk_id]))[0].tolist())[0]
        assert (hit.document_id, hit.title, hit.source) == (hit.metadata["id"], hit.metadata["title"], "")
        vectors = to_float32(split.embeddings.gather(np.array([hit.chunk_id])))
        assert hit.distance == pytest.approx(((vectors - retriever.embed([query])) ** 2).sum(), abs=2e-3)


def test_scores_of_embeddings_are_cosines_and_the_nearest_is_first(retriever: Retriever) -> None:
    vectors = retriever.embed(["memory of a chunk in the store", "训练数据"])
    found = retriever.search(vectors, 6)
    exact = exact_search(vectors, retriever.retrieval.own.embeddings, 6)[0]
    np.testing.assert_allclose([[hit.distance for hit in hits] for hits in found.hits], exact, atol=1e-5)
    np.testing.assert_allclose([[hit.score for hit in hits] for hits in found.hits], 1 - exact / 2, atol=1e-5)


def test_sparse_retrieval_finds_chunks_by_the_words_of_their_title(retriever: Retriever) -> None:
    """Only the first chunk contains the title, and the vectors of the others do not reflect it."""
    hits = retriever.search(["title 42"], 3, retrieval="sparse").hits[0]
    chunks = retriever.document("doc-42").num_chunks
    assert [hit.document_id for hit in hits[:chunks]] == ["doc-42"] * min(3, chunks)
    assert retriever.search(["zzz unheard"], 3, retrieval="sparse").hits == [[]]


def test_hybrid_retrieval_joins_the_candidates_of_both(retriever: Retriever) -> None:
    query = ["42"]  # of few chunks
    ids = {way: retriever.rank(query, 64, retrieval=way).ids[0] for way in RETRIEVALS}
    found = {way: set(each[each >= 0].tolist()) for way, each in ids.items()}
    assert found["hybrid"] <= found["dense"] | found["sparse"]
    assert found["sparse"] <= found["hybrid"]
    assert len(found["sparse"]) < 64 == len(found["hybrid"])


def test_words_without_vectors_and_vectors_without_words_are_found_by_hybrid_retrieval(retriever: Retriever) -> None:
    """A query without any known term is ordered by embeddings alone."""
    query = ["…?! zzz"]
    near = retriever.rank(query, 5).ids
    np.testing.assert_array_equal(retriever.rank(query, 5, retrieval="hybrid").ids, near)


@pytest.mark.parametrize("way", ["sparse", "hybrid"])
def test_deleted_documents_are_found_by_no_term(tiny_datastore: Datastore, tmp_path: Path, way: Retrieval) -> None:
    folder = shutil.copytree(tiny_datastore.folder, tmp_path / "copy")
    opened = Retriever.open(folder)
    victims = [hit.document_id for hit in opened.search(["title 42"], 3, retrieval=way).hits[0]]
    delete_documents(folder, victims)
    hits = opened.search(["title 42"], 40, retrieval=way).hits[0]
    assert len(hits) == 40
    assert not {hit.document_id for hit in hits} & set(victims)


def test_a_filter_that_matches_many_chunks_holds_for_sparse_retrieval(
    retriever: Retriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    filters = {"title": [f"Title {number}" for number in range(0, 150, 3)]}
    few = retriever.rank(["memory of a chunk"], 30, filters=filters, retrieval="sparse")
    monkeypatch.setattr("indexing.retrieval.candidates._FEW_CHUNKS", 0)
    many = retriever.rank(["memory of a chunk"], 30, filters=filters, retrieval="sparse")
    np.testing.assert_array_equal(few.ids, many.ids)
    np.testing.assert_allclose(few.scores, many.scores, rtol=1e-6)


def test_a_datastore_without_a_sparse_index_is_refused_by_name(tiny_datastore: Datastore, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_datastore.folder, tmp_path / "copy")
    manifest = read_datastore_manifest(folder)
    del manifest["fingerprints"]["sparse"]
    write_datastore_manifest(folder, {key: value for key, value in manifest.items() if key != "format_version"})
    opened = Retriever.open(folder)
    assert not opened.has_terms
    assert opened.search(["memory"], 2).hits[0]
    with pytest.raises(InputError, match="no finished 'sparse' stage"):
        opened.search(["memory"], 2, retrieval="hybrid")


@pytest.mark.parametrize("way", RETRIEVALS)
def test_filtered_search_finds_k_chunks_of_the_matching_documents(retriever: Retriever, way: Retrieval) -> None:
    split = retriever.retrieval.own
    row = max(split.metadata(range(split.num_documents)), key=lambda row: row["chunks"])
    hits = retriever.search(["数据 gradient"], 3, filters={"id": row["id"]}, retrieval=way).hits[0]
    assert [hit.document_id for hit in hits] == [row["id"]] * 3
    query = ["数据 gradient " + row["title"]]  # all chunks of the document have a term of its title
    all_of_it = retriever.search(query, 1000, filters={"id": row["id"]}, retrieval=way).hits[0]
    assert len({hit.chunk_id for hit in all_of_it}) == row["chunks"]
    assert retriever.search(["x"], 3, filters={"id": "nobody"}, retrieval=way).hits == [[]]


def test_filters_omit_deleted_documents(tiny_datastore: Datastore, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_datastore.folder, tmp_path / "copy")
    opened = Retriever.open(folder)
    filters = {"title": ["Title 8", "Title 9"]}
    before = opened.search(["memory"], 500, filters=filters).hits[0]
    victim = before[0].document_id
    delete_documents(folder, [victim])
    after = opened.search(["memory"], 500, filters=filters).hits[0]
    assert {hit.document_id for hit in before} - {hit.document_id for hit in after} == {victim}
    with pytest.raises(NotFound, match="deleted"):
        opened.chunk(before[0].chunk_id)
    with pytest.raises(NotFound, match="no document"):
        opened.document(victim)


def test_several_datastores_are_searched_as_one(
    tiny_datastore: Datastore, other: Datastore, retriever: Retriever
) -> None:
    both = Retriever.open(tiny_datastore.folder, other.folder)
    alone = Retriever.open(other.folder)
    queries = [text_of(alone, 30), text_of(retriever, 30)]
    titles = [each.chunk(30).metadata["title"] + " " for each in (alone, retriever)]  # other chunks have the same words
    for way, before in (("dense", ["", ""]), ("sparse", titles), ("hybrid", titles)):
        hits = both.search([title + query for title, query in zip(before, queries, strict=True)], 8, retrieval=way).hits
        assert [of_query[0].text for of_query in hits] == queries, way
    ids = [np.array(chunk_ids(each)) for each in both.search(queries, 8).hits]
    assert set((ids[0] >> CHUNK_ID_BITS).tolist()) | set((ids[1] >> CHUNK_ID_BITS).tolist()) == {0, 1}
    vectors = both.embed(queries)
    near = np.sort(np.concatenate([each.nearest(vectors, 8)[1] for each in (retriever, alone)], axis=1))[:, :8]
    np.testing.assert_allclose(both.nearest(vectors, 8)[1], near, atol=1e-6)
    theirs = next(hit for hits in both.search(queries, 8).hits for hit in hits if hit.chunk_id >> CHUNK_ID_BITS)
    stored = both.chunk(theirs.chunk_id)
    assert (stored.text, stored.metadata) == (theirs.text, theirs.metadata)
    assert "lang" not in both.filter_columns
    assert "lang" in alone.filter_columns
    found = both.search(queries, 500, filters={"title": "Title 7"}).hits[0]
    assert {hit.chunk_id >> CHUNK_ID_BITS for hit in found} == {0, 1}
    assert Retriever.open(tiny_datastore.folder, tiny_datastore.folder).retrieval == retriever.retrieval


def test_incompatible_datastores_are_refused(tiny_datastore: Datastore, tmp_path: Path) -> None:
    strange = build_local(tiny_config(tmp_path, write_corpus(tmp_path / "c.jsonl", 20, seed=9)))
    with pytest.raises(InputError, match=r"different tokenizers"):
        Retriever.open(tiny_datastore.folder, strange.folder)


def test_chunks_and_documents_by_id_return_the_text_in_order(retriever: Retriever) -> None:
    split = retriever.retrieval.own
    number = int(np.argmax([row["chunks"] for row in split.metadata(range(split.num_documents))]))
    row = split.metadata([number])[0]
    whole = retriever.document(row["id"], 0, 1000)
    assert whole.num_chunks == len(whole.chunks) == row["chunks"]
    assert [chunk.chunk_id for chunk in whole.chunks] == list(range(*split.chunk_range(number)))
    assert retriever.document(row["id"], 1, 2).chunks == whole.chunks[1:3]
    assert retriever.document(row["id"], row["chunks"], 2).chunks == []
    for before, after in zip(whole.chunks, whole.chunks[1:], strict=False):
        assert (before.next_chunk_id, after.previous_chunk_id) == (after.chunk_id, before.chunk_id)
        assert before.continuation == after.text
    assert (whole.chunks[0].previous_chunk_id, whole.chunks[-1].next_chunk_id) == (None, None)
    assert retriever.chunk(whole.chunks[1].chunk_id) == whole.chunks[1]
    assert (whole.document_id, whole.title) == (row["id"], row["title"])


@pytest.mark.parametrize("chunk_id", [-1, 10**6, 1 << CHUNK_ID_BITS, 1 << 62])
def test_unknown_chunk_id_is_not_found(retriever: Retriever, chunk_id: int) -> None:
    with pytest.raises(NotFound, match=f"no chunk {chunk_id}"):
        retriever.chunk(chunk_id)


@pytest.mark.parametrize(
    ("queries", "options", "words"),
    [
        ([""], {}, "is empty"),
        ([" \n"], {}, "is empty"),
        (["a", [1]], {}, "all texts, all token ids or all vectors"),
        ([np.array([], dtype=np.int64)], {}, "is empty"),
        ([[5, 4000]], {}, "token id 4000: the tokenizer's are 0 to"),
        ([[-1]], {}, "token id -1"),
        (np.zeros((1, 32)), {}, "zero"),
        (np.full((1, 32), np.nan), {}, "not finite"),
        (np.ones((1, 31)), {}, r"shape \[1, 31\]: must be \[queries, 32\]"),
        (np.ones((1, 32)), {"retrieval": "sparse"}, "vectors have no terms"),
        (["a"], {"k": 0}, "k = 0: must be at least 1"),
        (["a"], {"retrieval": "magic"}, "accepted are dense, sparse, hybrid"),
        (["a"], {"filters": {"lang": "en"}}, "no column 'lang'; accepted are id, file, title"),
    ],
)
def test_invalid_queries_are_refused_with_the_reason(retriever: Retriever, queries, options, words: str) -> None:
    with pytest.raises(InputError, match=words):
        retriever.search(queries, **options)


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


def test_texts_are_padded_in_groups_of_similar_length(retriever: Retriever, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["index " * 300, *("chunk " * number for number in range(1, 20)), "检索 " * 40]
    expected, padded = retriever.embed(texts), list[int]()
    embed = type(retriever.embedder).embed

    def counted(self: object, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        padded.append(tokens.size)
        return embed(self, tokens, lengths)

    monkeypatch.setattr(type(retriever.embedder), "embed", counted)
    monkeypatch.setattr("indexing.retrieval.retriever._PADDED_TOKENS", 1000)
    np.testing.assert_allclose(retriever.embed(texts), expected, rtol=1e-6)
    assert sum(padded) < 3000  # padding to the longest of 21 texts would give more than 300 for each
    assert len(padded) < 10


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
