"""What fills the page's forms: filter values are accepted by filters."""

import pytest
from starlette.testclient import TestClient

from indexing.retrieval.retriever import Retriever
from retro.server.app import make_app
from retro.server.settings import ServeSettings
from tests.retro.server.conftest import TEXT

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
