"""What fills the page's forms: examples come from held-out documents, and filter values are accepted by filters."""

import json
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from indexing.retrieval.retriever import Retriever
from retro.server.app import make_app
from retro.server.page_api import held_out_passages
from retro.server.settings import ServeSettings
from tests.conftest import build_local, tiny_config
from tests.retro.server.conftest import TEXT


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Retriever:
    """Two datastores searched as one: texts about ships, and texts about trains. No document is held out."""
    folders = []
    for word in ("ship", "train"):
        folder = tmp_path_factory.mktemp(word)
        corpus = folder / "corpus.jsonl"
        rows = [{"id": f"{word}/{n}", "text": f"the {word} number {n} of the {word}s leaves " * 8} for n in range(30)]
        corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = tiny_config(folder, corpus)
        config = replace(config, corpus=replace(config.corpus, split=(1, 0, 0)))
        if folders:  # datastores that are searched as one share the tokenizer and the embedder
            model = str(folders[0] / "tokenizer" / "sentencepiece.model")
            config = replace(config, tokenizer=replace(config.tokenizer, kind="sentencepiece", path=model))
            config = replace(config, embedder=replace(config.embedder, path=str(folders[0])))
        folders.append(build_local(config).folder)
    return Retriever.open(*folders)


# --- examples --------------------------------------------------------------------------------------------------------


def test_examples_are_beginnings_of_held_out_documents(client: TestClient, retriever: Retriever) -> None:
    answer = client.get("/examples", params={"count": 3, "chunks": 2}).json()
    assert answer["held_out"]
    stored = retriever.datastore.valid
    ids = {row["id"] for row in stored.metadata(range(stored.num_documents))}
    assert len(answer["examples"]) == 3
    for example in answer["examples"]:
        assert example["document_id"] in ids
        document = next(iter(stored.find_documents([example["document_id"]])))
        first = stored.chunk_range(document)[0]
        assert example["text"].startswith(retriever.tokenizer.decode(stored.tokens.read(first, first + 1)[0])[:20])
        assert len(retriever.tokenizer.encode(example["text"])) <= 2 * retriever.datastore.chunk_length + 1


def test_the_first_example_has_the_nearest_neighbors(retriever: Retriever) -> None:
    texts = [each.text for each in held_out_passages(retriever, 4, 2).examples]
    distances = [retriever.search([text], 1).hits[0][0].distance for text in texts]
    assert distances[0] == min(distances)


def test_without_held_out_documents_examples_are_from_the_datastore(two: Retriever) -> None:
    answer = held_out_passages(two, 2, 100)  # no document has 100 chunks
    assert not answer.held_out
    assert all(example.document_id.startswith("ship/") for example in answer.examples)
    assert len(answer.examples) == 2


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


def test_an_unknown_column_is_refused_by_name(client: TestClient) -> None:
    answer = client.get("/filter-values", params={"column": "author"})
    assert answer.status_code == 422
    assert "title" in answer.json()["error"]["message"]


# --- one of several datastores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [True, False])
def test_a_search_can_be_limited_to_one_datastore(two: Retriever, text: bool) -> None:
    with TestClient(make_app(two, None, ServeSettings(allowed_hosts=("testserver",)))) as client:
        names = [each["name"] for each in client.get("/datastore").json()["datastores"]]
        for name, word in zip(names, ("ship", "train"), strict=True):
            body = {"texts": ["the train number 3"], "datastore": name, "k": 9, "text": text}
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
