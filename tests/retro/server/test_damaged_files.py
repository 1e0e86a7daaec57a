"""A server whose files are damaged, removed or replaced answers 503 with their names, and neither dies nor answers from them."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from indexing.retrieval.retriever import Retriever
from indexing.store import watch
from indexing.store.datastore import Datastore
from indexing.store.errors import DamagedFile
from retro.inference.language_model import LanguageModel
from retro.server.app import make_app
from retro.server.settings import ServeSettings
from tests.retro.server.conftest import TEXT

FILES = {
    "tokens": "chunks/00000/train/tokens.npy",
    "documents": "chunks/00000/train/documents.npy",
    "embeddings": "embeddings/00000/train.npy",
    "positions": "suffixes/00000-00006-00000/positions.npy",
    "vectors": "index/00000/vectors.faiss",
    "terms": "sparse/00000/chunks-0.idx",
}
REQUESTS: dict[str, dict] = {
    "/search": {"texts": [TEXT], "k": 2, "retrieval": "hybrid"},
    "/trace": {"text": TEXT},
    "/score": {"text": TEXT * 4, "k": 2},
    "/generate": {"prompt": TEXT, "max_tokens": 4, "k": 2},
}


@pytest.fixture(scope="module", autouse=True)
def no_pause() -> Iterator[None]:
    """The files are checked before every request, however long the last check took, those that open `client` included."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(watch, "_PAUSE", 0)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, voting_datastore: Datastore) -> Path:
    return Path(shutil.copytree(voting_datastore.folder, tmp_path_factory.mktemp("served") / "datastore"))


@pytest.fixture(scope="module")
def client(folder: Path, tiny_run: Path) -> Iterator[TestClient]:
    retriever = Retriever.open(folder)
    settings = ServeSettings(name="tiny", allowed_hosts=("testserver",))
    with TestClient(make_app(retriever, LanguageModel.open(tiny_run, retriever, "cpu"), settings)) as client:
        for path, body in REQUESTS.items():
            assert client.post(path, json=body).status_code == 200  # all files are open now
        yield client


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwritten(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(file.seek(0, os.SEEK_END) // 2)
        file.write(b"\xff" * 64)


def removed(path: Path) -> None:
    path.rename(path.with_name("moved"))


def folder_removed(path: Path) -> None:
    path.parent.rename(path.parent.with_name("moved"))


def restore(path: Path, data: bytes) -> None:
    """Undo one of these in place."""
    if path.parent.with_name("moved").exists():
        path.parent.with_name("moved").rename(path.parent)
    elif path.with_name("moved").exists():
        path.with_name("moved").rename(path)
    else:
        with open(path, "r+b") as file:
            file.write(data)


@pytest.mark.parametrize("damage", [truncated, overwritten, removed, folder_removed])
@pytest.mark.parametrize("name", FILES.values(), ids=FILES)
def test_no_request_is_answered_from_a_damaged_file_which_is_named(
    client: TestClient, folder: Path, name: str, damage: Callable[[Path], None]
) -> None:
    whole = (folder / name).read_bytes()
    damage(folder / name)
    try:
        for path, body in REQUESTS.items():
            answer = client.post(path, json=body)
            assert answer.status_code == 503, (path, answer.text)
            error = answer.json()["error"]
            assert error["code"] == "damaged_file"
            assert name.rpartition("/")[0] in error["message"]
            assert str(folder) not in answer.text
        ready = client.get("/ready")
        assert ready.status_code == 503
        assert name.rpartition("/")[0] in ready.json()["error"]["message"]
        assert client.get("/health").status_code == 200
    finally:
        restore(folder / name, whole)
    assert client.get("/ready").status_code == 200
    for path, body in REQUESTS.items():
        assert client.post(path, json=body).status_code == 200


def test_file_that_was_read_damaged_at_the_start_is_named_once_a_request_fails(
    tmp_path: Path, voting_datastore: Datastore, tiny_run: Path
) -> None:
    folder = shutil.copytree(voting_datastore.folder, tmp_path / "datastore")
    path = folder / "chunks/00000/train/tokens.npy"
    tokens = np.load(path, mmap_mode="r+")
    tokens[:] = np.iinfo(tokens.dtype).max
    tokens.flush()
    os.utime(path)
    retriever = Retriever.open(folder)
    language_model = LanguageModel.open(tiny_run, retriever, "cpu")
    app = make_app(retriever, language_model, ServeSettings(name="tiny", allowed_hosts=("testserver",)))
    client = TestClient(app, raise_server_exceptions=False)  # no warming up
    assert client.get("/ready").status_code == 200
    for path in ("/score", "/generate"):
        answer = client.post(path, json=REQUESTS[path])
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "damaged_file")
        assert "chunks/00000/train/tokens.npy has changed" in answer.json()["error"]["message"]
        assert client.get("/ready").status_code == 503


def test_server_does_not_start_with_a_file_of_another_size(tmp_path: Path, voting_datastore: Datastore) -> None:
    folder = shutil.copytree(voting_datastore.folder, tmp_path / "datastore")
    retriever = Retriever.open(folder)
    truncated(folder / "suffixes/00000-00006-00000/positions.npy")
    with pytest.raises(DamagedFile, match=r"positions\.npy has .* bytes instead of"):
        make_app(retriever, None, ServeSettings())


@pytest.mark.parametrize("name", ["neighbors/00000/valid/ids.npy", "votes/00000/valid.zst", "votes/00000/valid.npy"])
def test_truncated_neighbors_and_votes_are_503_without_a_path_of_the_server(
    tmp_path: Path, voting_datastore: Datastore, name: str
) -> None:
    folder = shutil.copytree(voting_datastore.folder, tmp_path / "datastore")
    retriever = Retriever.open(folder)
    settings = ServeSettings(name="tiny", allowed_hosts=("testserver",))
    with TestClient(make_app(retriever, None, settings)) as client:
        truncated(folder / name)
        answer = client.get("/examples")
        assert answer.status_code == 503
        assert name in answer.json()["error"]["message"]
        assert str(tmp_path) not in answer.text


def test_artifact_that_was_made_again_is_not_damaged(tmp_path: Path, voting_datastore: Datastore) -> None:
    folder = shutil.copytree(voting_datastore.folder, tmp_path / "datastore")
    retriever = Retriever.open(folder)
    settings = ServeSettings(name="tiny", allowed_hosts=("testserver",))
    with TestClient(make_app(retriever, None, settings)) as client:
        artifact = folder / "suffixes" / "00000-00006-00000"
        again = shutil.copytree(artifact, tmp_path / "again")
        shutil.rmtree(artifact)
        assert client.get("/ready").status_code == 503
        again.rename(artifact)
        assert client.get("/ready").status_code == 200
        truncated(artifact / "positions.npy")
        assert client.get("/ready").status_code == 503
        whole = shutil.copy(
            voting_datastore.folder / "suffixes/00000-00006-00000/positions.npy", tmp_path / "positions.npy"
        )
        Path(whole).rename(artifact / "positions.npy")
        assert "start the process that reads it again" in client.get("/ready").json()["error"]["message"]
