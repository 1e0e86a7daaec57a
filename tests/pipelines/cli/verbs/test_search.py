"""`retro search` prints chunks of different documents, and helps when a filter matches nothing."""

import json
from dataclasses import replace
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from indexing.store.datastore import Datastore
from pipelines.cli.main import main
from tests.conftest import build_local, tiny_config

QUERY = "the index of the store"


@pytest.fixture(scope="module")
def datastore(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    """Ten documents; the first has the words of the query in each of its chunks, the others once."""
    folder = tmp_path_factory.mktemp("search")
    texts = [f"{QUERY} {QUERY} again and again. " * 12] + [
        f"train number {n} leaves. {QUERY} is here. " + "other words of a long text. " * 9 for n in range(9)
    ]
    columns = {"text": texts, "id": [f"doc-{n}" for n in range(10)], "price": pa.array([Decimal("1.50")] * 10)}
    pq.write_table(pa.table(columns), folder / "d.parquet")
    config = tiny_config(folder, folder / "d.parquet")
    return build_local(replace(config, corpus=replace(config.corpus, split=(1, 0, 0), metadata_keys=("price",))))


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict]:
    assert main(["search", *arguments, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("retrieval", ["dense", "sparse", "hybrid"])
def test_the_chunks_are_of_different_documents_in_order(
    datastore: Datastore, capsys: pytest.CaptureFixture[str], retrieval: str
) -> None:
    where = (str(datastore.folder), QUERY, "--retrieval", retrieval)
    best = found(capsys, *where, "--k", "5", "--same-document")
    hits = found(capsys, *where, "--k", "5")
    assert len({hit["document"]["id"] for hit in best}) < 5
    assert len({hit["document"]["id"] for hit in hits}) == 5
    assert hits[0] == best[0]
    scores = [hit["score"] for hit in hits]
    assert scores == sorted(scores, reverse=True)


def test_other_chunks_of_a_document_are_printed_if_there_are_too_few_documents(
    datastore: Datastore, capsys: pytest.CaptureFixture[str]
) -> None:
    hits = found(capsys, str(datastore.folder), QUERY, "--k", "4", "--filters", "id=doc-0", "id=doc-3")
    assert len({hit["chunk_id"] for hit in hits}) == 4
    assert {hit["document"]["id"] for hit in hits} == {"doc-0", "doc-3"}


def test_a_filter_that_matches_nothing_shows_how_its_values_are_stored(
    datastore: Datastore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(found(capsys, str(datastore.folder), QUERY, "--filters", "price=1.50")) == 5
    assert main(["search", str(datastore.folder), QUERY, "--filters", "price=1.5"]) == 0
    shown = capsys.readouterr()
    assert "nothing found with --filters price" in shown.err + shown.out
    assert "'1.50'" in shown.err + shown.out
