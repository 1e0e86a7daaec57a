"""Search over HTTP equals search in Python for every form of query; invalid queries are rejected with their field."""

import base64
import json
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from starlette.testclient import TestClient

from indexing.neighbors.search import NeighborSettings
from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from indexing.store.errors import NotFound
from indexing.tokenization.tokenizer import Tokenizer
from retro.server.app import make_app
from retro.server.settings import ServeSettings
from tests.retro.server.conftest import TEXT, Make

TEXTS = [TEXT, "gradient of the loss", "检索模型训练"]


def results(client: TestClient, **body) -> list[list[dict]]:
    response = client.post("/search", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert (answer["partial"], answer["missing"]) == (False, [])
    return answer["results"]


def problem(client: TestClient, path: str = "/search", **body) -> tuple[int, str | None, str]:
    response = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


def test_texts_tokens_and_vectors_give_the_results_of_python(client: TestClient, retriever: Retriever) -> None:
    found = results(client, texts=TEXTS, k=3)
    for hits, expected in zip(found, retriever.search(TEXTS, 3).hits, strict=True):
        assert [hit["chunk_id"] for hit in hits] == [hit.chunk_id for hit in expected]
        for hit, other in zip(hits, expected, strict=True):
            assert (hit["text"], hit["continuation"]) == (other.text, other.continuation)
            assert hit["distance"] == pytest.approx(other.distance)
            assert hit["score"] == pytest.approx(other.score)
            assert (hit["document_id"], hit["title"]) == (other.document_id, other.title)
            assert hit["metadata"] == other.metadata
    vectors = retriever.embed(TEXTS)
    coded = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    tokens = [row.tolist() for row in retriever.tokenizer.encode_batch(TEXTS)]
    for queries in ({"tokens": tokens}, {"vectors": vectors.tolist()}, {"vectors": coded}):
        again = results(client, k=3, **queries)
        assert [[hit["chunk_id"] for hit in hits] for hits in again] == [
            [hit["chunk_id"] for hit in hits] for hits in found
        ]


def test_text_false_omits_texts_and_returns_the_same_chunks(client: TestClient) -> None:
    full, bare = results(client, texts=TEXTS), results(client, texts=TEXTS, text=False)
    for hits, others in zip(full, bare, strict=True):
        assert [(h["chunk_id"], h["distance"]) for h in hits] == [(h["chunk_id"], h["distance"]) for h in others]
        assert all(h["text"] == h["continuation"] == "" and h["metadata"] == {} for h in others)


def test_concurrent_requests_get_their_own_answers(client: TestClient) -> None:
    bodies = [{"texts": [f"{text} {number}"], "k": k} for number in range(8) for text in TEXTS for k in (1, 4)]
    alone = [results(client, **body) for body in bodies]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda body: results(client, **body), bodies)) == alone
    metrics = client.get("/metrics").text
    assert 'retro_batch_size_count{work="search"}' in metrics
    assert 'retro_requests_total{method="POST",path="/search",status="200"}' in metrics


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, None, "none"),
        ({"texts": ["a"], "tokens": [[5]]}, None, "texts, tokens"),
        ({"texts": ["a"], "k": 101}, "k", "max_k"),
        ({"texts": ["a"], "k": "5"}, "k", "integer"),
        ({"texts": ["a"] * 257}, "texts", "max_queries"),
        ({"texts": ["\n\t \u3000"]}, "texts.0", "empty"),
        ({"tokens": [[]]}, None, "empty"),
        ({"tokens": [[10**6]]}, None, "1000000"),
        ({"tokens": [[5] * 17_000]}, "tokens", "max_input_tokens"),
        ({"texts": ["a" * 200_000, "b" * 70_000]}, "texts", "270,000 characters"),
        ({"texts": ["a"] * 129, "retrieval": "hybrid"}, "texts", "max_candidates"),
        ({"texts": ["a"] * 164, "k": 100}, "texts", "max_candidates"),
        ({"vectors": [[0.5] * 31]}, "vectors", "31"),
        ({"vectors": [[0.5] * 32, [math.nan] * 32]}, "vectors.1.0", "finite"),
        ({"vectors": [[1e300] * 32]}, "vectors", "not finite"),
        ({"vectors": [[0.0] * 32]}, None, "zero"),
        ({"vectors": ["%%%"]}, "vectors", "base64"),
        ({"vectors": ["AAAA"]}, "vectors", "base64"),
        ({"vectors": [base64.b64encode(np.full(32, np.nan, "<f4").tobytes()).decode()]}, "vectors", "not finite"),
    ],
)
def test_invalid_searches_are_rejected_with_their_field(client: TestClient, body, param, said: str) -> None:
    status, named, message = problem(client, **body)
    assert status == 422
    assert said in message
    if param is not None:
        assert named == param


def test_filters_select_documents_and_columns_are_listed(client: TestClient, retriever: Retriever) -> None:
    columns = client.get("/datastore").json()["filters"]
    assert columns == retriever.filter_columns
    hits = results(client, texts=[TEXT], k=4, filters={"id": ["doc-1", "doc-2"]})[0]
    assert hits
    assert {hit["document_id"] for hit in hits} <= {"doc-1", "doc-2"}
    status, _, message = problem(client, texts=["a"], filters={"nonsense": 1})
    assert status == 422
    assert "nonsense" in message


def test_embed_equals_the_retrievers_vectors(client: TestClient, retriever: Retriever) -> None:
    expected = retriever.embed(TEXTS)
    numbers = client.post("/embed", json={"texts": TEXTS}).json()["vectors"]
    np.testing.assert_allclose(numbers, expected, rtol=1e-6)
    coded = client.post("/embed", json={"texts": TEXTS, "encoding": "base64"}).json()["vectors"]
    again = [np.frombuffer(base64.b64decode(each), "<f4") for each in coded]
    np.testing.assert_array_equal(again, expected)
    assert client.post("/embed", json={"texts": []}).json() == {"vectors": []}


# --- by id -----------------------------------------------------------------------------------------------------------


def test_a_document_consists_of_its_chunks(client: TestClient) -> None:
    hit = results(client, texts=[TEXT], k=1)[0][0]
    chunk = client.get(f"/chunks/{hit['chunk_id']}").json()
    assert {key: chunk[key] for key in ("text", "continuation", "document_id")} == {
        key: hit[key] for key in ("text", "continuation", "document_id")
    }
    document = client.get(f"/documents/{hit['document_id']}", params={"count": 1000}).json()
    assert len(document["chunks"]) == document["num_chunks"]
    ids = [each["chunk_id"] for each in document["chunks"]]
    assert hit["chunk_id"] in ids
    assert [each["previous_chunk_id"] for each in document["chunks"]] == [None, *ids[:-1]]
    assert [each["next_chunk_id"] for each in document["chunks"]] == [*ids[1:], None]
    part = client.get(f"/documents/{hit['document_id']}", params={"first": 1, "count": 2}).json()
    assert part["chunks"] == document["chunks"][1:3]
    beyond = client.get(f"/documents/{hit['document_id']}", params={"first": 10**9}).json()
    assert beyond["chunks"] == []


def test_any_string_can_be_a_document_id(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    by_path = client.get("/documents/doc-1", params={"count": 2}).json()
    assert client.get("/documents", params={"id": "doc-1", "count": 2}).json() == by_path
    assert client.get("/documents").status_code == 422
    asked: list[str] = []

    def document(self: Retriever, document_id: str, first: int, count: int) -> None:
        asked.append(document_id)
        raise NotFound("none")

    monkeypatch.setattr(Retriever, "document", document)
    odd = [".", "..", "a\nb", "\r\n", "../../etc/passwd", "a//b", "#?&=%00", "汉字"]
    assert [client.get("/documents", params={"id": each}).status_code for each in odd] == [404] * len(odd)
    assert asked == odd


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *((path, 404) for path in ("/chunks/10000000", f"/chunks/{2**62}", "/documents/none", "/documents/a/b")),
        *((path, 422) for path in ("/chunks/-1", "/chunks/x", f"/chunks/{2**70}", "/documents/doc-1?first=-1")),
    ],
)
def test_unknown_ids_are_404_and_invalid_ids_are_422(client: TestClient, path: str, status: int) -> None:
    assert client.get(path).status_code == status


# --- neighbors of a text ---------------------------------------------------------------------------------------------


def test_neighbors_equal_those_the_model_reads(client: TestClient, retriever: Retriever) -> None:
    """The first chunk starts with BOS, as in training and scoring."""
    tokens = np.concatenate([[retriever.tokenizer.bos_id], retriever.tokenizer.encode(TEXT * 3)]).astype(np.int64)
    full = len(tokens) // 16
    ids, _ = retriever.nearest(
        retriever.embedder.embed(tokens[: full * 16].reshape(-1, 16), np.full(full, 16, dtype=np.int64)), 2
    )
    chunks = client.post("/neighbors", json={"text": TEXT * 3, "k": 2}).json()["chunks"]
    assert [[hit["chunk_id"] for hit in chunk["neighbors"]] for chunk in chunks[:full]] == ids.tolist()
    assert sum(chunk["tokens"] for chunk in chunks) == len(tokens)


def test_neighbor_tokens_are_the_retrievers_by_the_rules_of_the_stored_neighbors(
    tiny_datastore: Datastore, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = tiny_datastore.train.tokens.read(40, 60).astype(np.int64)
    dense = Retriever.open(tiny_datastore.folder).neighbors(chunks, 2)[0]
    stored = NeighborSettings(stored=6, candidates=24, rerank="tokens")
    monkeypatch.setattr(Retriever, "_stored", (stored, "exact"))
    retriever = Retriever.open(tiny_datastore.folder)
    assert (retriever.neighbors(chunks, 2)[0] != dense).any()
    app = make_app(retriever, None, ServeSettings(name="tiny", allowed_hosts=("testserver",)), token="")
    whole = chunks[0].tolist()
    with TestClient(app) as client:
        for k in (1, 2, 100):
            answer = client.post("/neighbors/tokens", json={"chunks": chunks[:3].tolist(), "k": k}).json()
            tokens, lengths = retriever.neighbors(chunks[:3], k)
            assert (answer["tokens"], answer["lengths"]) == (tokens.tolist(), lengths.tolist())
            assert not answer["partial"]
        assert client.post("/neighbors/tokens", json={"chunks": []}).json()["tokens"] == []
        for wrong, param in (
            ({"chunks": [whole, whole[1:]]}, "chunks"),
            ({"chunks": [whole], "k": 101}, "k"),
            ({"chunks": [[10**6] * 16]}, None),
            ({"chunks": [whole] * 257}, "chunks"),
        ):
            status, named, _ = problem(client, "/neighbors/tokens", **wrong)
            assert (status, named if param else None) == (422, param)


@pytest.mark.parametrize("path", ["/embed", "/neighbors", "/score", "/tokenize", "/generate"])
def test_long_texts_are_rejected_before_tokenization(
    client: TestClient, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    field = {"/embed": "texts", "/tokenize": "prompt", "/generate": "prompt"}.get(path, "text")
    monkeypatch.setattr(Tokenizer, "encode_batch", None)
    text = "a" * (2**18 + 1)
    status, param, message = problem(client, path, **{field: [text] if field == "texts" else text})
    assert (status, param) == (422, field)
    assert "max_characters" in message


def test_the_number_of_chunks_of_a_text_is_limited(app_with: Make) -> None:
    with TestClient(app_with(max_queries=3)) as client:
        assert client.post("/neighbors", json={"text": "index " * 10}).status_code == 200
        for path, body, param in (
            ("/neighbors", {"text": "index " * 100}, "chunks of text"),
            ("/neighbors", {"text": " "}, "text"),
            ("/embed", {"texts": [""]}, "texts.0"),
        ):
            assert problem(client, path, **body)[:2] == (422, param)


# --- values to filter by ---------------------------------------------------------------------------------------------


def test_every_offered_value_filters(client: TestClient) -> None:
    for column in client.get("/datastore").json()["filters"]:
        values = client.get("/filter-values", params={"column": column, "count": 3}).json()["values"]
        for value in values:
            body = {"texts": [TEXT], "filters": {column: value}}
            hits = client.post("/search", json=body).json()["results"][0]
            assert hits or column in ("chunks", "tokens", "bytes")
            assert all(hit["metadata"][column] == value for hit in hits)


def test_values_contain_the_text_in_any_case(client: TestClient) -> None:
    answer = client.get("/filter-values", params={"column": "title", "contains": "TITLE 1"}).json()
    assert "Title 1" in answer["values"]
    assert all("title 1" in value.lower() for value in answer["values"])
    few = client.get("/filter-values", params={"column": "title", "count": 1}).json()
    assert (len(few["values"]), few["complete"]) == (1, False)
    unknown = client.get("/filter-values", params={"column": "author"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (422, "column")


# --- one of several datastores ---------------------------------------------------------------------------------------


def test_a_search_can_be_limited_to_one_datastore(two: Retriever) -> None:
    with TestClient(make_app(two, None, ServeSettings(allowed_hosts=("testserver",)))) as client:
        names = [each["name"] for each in client.get("/datastore").json()["datastores"]]
        for name, word in zip(names, ("ship", "train"), strict=True):
            body = {"texts": ["the train number 3"], "datastore": name, "k": 9}
            hits = client.post("/search", json=body).json()["results"][0]
            assert len(hits) == 9
            for hit in hits:
                chunk = client.get(f"/chunks/{hit['chunk_id']}").json()
                assert chunk["document_id"].startswith(word)
        neighbors = client.post("/neighbors", json={"text": "the ship leaves", "datastore": names[1]}).json()
        (chunk,) = neighbors["chunks"]
        assert all(hit["document_id"].startswith("train") and word in hit["text"] for hit in chunk["neighbors"])
        refused = client.post("/search", json={"texts": ["a"], "datastore": "planes"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (422, "datastore")
        assert names[0] in refused.json()["error"]["message"]


def test_every_scored_token_names_its_chunk(client: TestClient, retriever: Retriever) -> None:
    answer = client.post("/score", json={"text": TEXT * 3, "return_sources": True}).json()
    numbers = [token["chunk"] for token in answer["tokens"]]
    assert numbers == sorted(numbers)
    for chunk in answer["sources"]["chunks"][1:]:  # the first one begins with the beginning-of-document token
        text = "".join(token["text"] for token in answer["tokens"] if token["chunk"] == chunk["chunk"])
        assert text.strip("\ufffd") in chunk["text"] or chunk["text"].strip("\ufffd") in text


def test_spans_of_a_neighbor_are_the_same_text(retriever: Retriever, client) -> None:
    text = retriever.chunk(3).text + retriever.chunk(3).continuation
    answer = client.post("/neighbors", json={"text": text * 2, "k": 3})
    chunks = answer.json()["chunks"]
    assert "".join(chunk["text"] for chunk in chunks) == text * 2
    spans = 0
    for chunk in chunks:
        for hit in chunk["neighbors"]:
            both = hit["text"] + hit["continuation"]
            longest = max((span["tokens"] for span in hit["spans"]), default=0)
            assert longest == (round(hit["overlap"] * chunk["tokens"]) if longest else 0)
            for span in hit["spans"]:
                spans += 1
                assert chunk["text"][slice(*span["chunk"])] == both[slice(*span["neighbor"])]
    assert spans > 3
