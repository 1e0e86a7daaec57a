"""Artifacts at URLs are complete or absent, here and there, fetched once, checked, and dropped when they change."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pytest

from indexing.store import remote
from indexing.store.artifact import MANIFEST, Recipe, create, is_finished, read_manifest, remove
from indexing.store.datastore import Datastore, write_datastore_manifest
from indexing.store.errors import InputError
from indexing.store.files import read_checked, write_checked
from indexing.store.sharded_array import ShardedArray

ROWS = np.arange(4000, dtype=np.uint16).reshape(1000, 4)


@pytest.fixture(params=["s3", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path, another_machine) -> str:
    """Locations of a datastore: on a server, in a folder, and in the memory of this process."""
    if request.param == "s3":
        return request.getfixturevalue("bucket") + "/some/wiki"
    return f"memory://{tmp_path.name}/wiki" if request.param == "memory" else f"file://{tmp_path}/away/wiki"


def recipe(**settings) -> Recipe:
    return Recipe("chunk", 1, {"shard": 0, **settings}, {})


def make(url: str, made_of: Recipe | None = None, rows: np.ndarray = ROWS) -> Path:
    """Build an artifact of two files and its datastore's manifest; returns the artifact's local folder."""
    folder = remote.local_folder(url)
    with create(folder / "chunks" / "00000", made_of or recipe()) as (work, counts):
        (work / "train").mkdir()
        np.save(work / "train" / "tokens.npy", rows)
        (work / "documents.txt").write_text("one")
        counts["chunks"] = len(rows)
    write_datastore_manifest(folder, {"rows": len(rows), "sum": int(rows.sum())})
    return folder / "chunks" / "00000"


def files_at(url: str) -> dict[str, bytes]:
    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.invalidate_cache()
    return {path[len(root) + 1 :]: filesystem.cat_file(path) for path in filesystem.find(root)}


def files_in(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != ".fetch.lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("s3://bucket/a/wiki", "s3://bucket/a/wiki"),
        ("/some/cache/s3:/bucket/a/wiki/chunks", "s3://bucket/a/wiki/chunks"),
        ("file:///data/wiki", "file:///data/wiki"),
        ("https://host:8000/wiki", "https://host:8000/wiki"),
        ("data/wiki", None),
        ("/data/12:30/wiki", None),
        ("C:/data", None),
    ],
)
def test_url_is_recovered_from_local_paths(monkeypatch, location: str, url: str | None) -> None:
    monkeypatch.setenv("RETRO_CACHE", "/mnt/cache")
    assert remote.url_of(location) == remote.url_of(Path(location)) == url
    assert remote.absolute(Path(location)) == (url or str(Path(location).resolve()))
    folder = remote.local_folder(location)
    assert folder == (Path("/mnt/cache") / Path(url) if url else Path(location))
    assert remote.url_of(folder) == url
    assert remote.local_folder(folder) == folder


def test_finished_artifact_is_at_the_url_and_visible_from_another_machine(url, another_machine) -> None:
    made = make(url)
    here = files_in(remote.local_folder(url))
    assert files_at(url) == here
    assert len(here) == 4
    another_machine()
    folder = remote.local_folder(url) / "chunks" / "00000"
    assert folder != made
    assert not is_finished(folder, recipe())
    remote.pull(remote.local_folder(url))
    assert is_finished(folder, recipe())
    assert list(files_in(folder)) == [MANIFEST]  # no other file was fetched
    with pytest.raises(InputError, match="epochs was 'not set', now 2"):
        is_finished(folder, recipe(epochs=2))


def test_each_file_is_fetched_once_when_needed(url, another_machine, monkeypatch) -> None:
    make(url)
    another_machine()
    folder = remote.local_folder(url) / "chunks" / "00000"
    assert read_manifest(folder)["counts"] == {"chunks": 1000}
    tokens = remote.present(folder / "train" / "tokens.npy")
    assert np.array_equal(np.load(tokens), ROWS)
    assert set(files_in(folder)) == {MANIFEST, "train/tokens.npy"}
    assert remote.present(folder) == folder
    assert set(files_in(folder)) == {MANIFEST, "train/tokens.npy", "documents.txt"}
    monkeypatch.setattr(remote, "_asking", None)  # another request would fail
    assert remote.present(folder / "train" / "tokens.npy") == tokens
    assert remote.present(folder) == folder


def test_threads_that_fetch_the_same_file_all_read_it_completely(url, another_machine) -> None:
    make(url)
    another_machine()
    path = remote.local_folder(url) / "chunks" / "00000" / "train" / "tokens.npy"
    with ThreadPoolExecutor(8) as pool:
        assert all(np.array_equal(rows, ROWS) for rows in pool.map(lambda _: np.load(remote.present(path)), range(8)))


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-1] + b"\x77"])
def test_damaged_file_is_refused_by_name_and_not_cached(url, another_machine, damage: Callable[[bytes], bytes]) -> None:
    make(url)
    there = f"{url}/chunks/00000/train/tokens.npy"
    whole = files_at(url)["chunks/00000/train/tokens.npy"]
    filesystem, root = fsspec.core.url_to_fs(there)
    filesystem.pipe_file(root, damage(whole))
    another_machine()
    folder = remote.local_folder(url) / "chunks" / "00000"
    with pytest.raises(InputError, match=r"tokens\.npy differs from its manifest"):
        remote.present(folder / "train" / "tokens.npy")
    assert list(files_in(folder)) == [MANIFEST]
    filesystem.pipe_file(root, whole)
    assert np.array_equal(np.load(remote.present(folder / "train" / "tokens.npy")), ROWS)


def test_ranges_are_read_without_fetching_the_file(url, another_machine) -> None:
    make(url)
    another_machine()
    paths = [remote.local_folder(url) / "chunks" / "00000" / "train" / "tokens.npy"]
    array = ShardedArray(paths, [1000], "pread")
    ids = np.array([999, 3, 4, 500, 3])
    assert np.array_equal(array.gather(ids), ROWS[ids])
    assert array.row_shape == (4,)
    assert not paths[0].exists()
    remote.present(paths[0])
    fsspec.core.url_to_fs(url)[0].rm(fsspec.core.url_to_fs(url)[1], recursive=True)
    assert np.array_equal(array.gather(ids), ROWS[ids])  # read from the local copy


def test_failed_upload_leaves_no_finished_artifact(url, another_machine, monkeypatch) -> None:
    put = remote._put

    def failing(file: Path, to: str) -> None:
        if file.name == MANIFEST:
            raise InputError("the network is gone")
        put(file, to)

    monkeypatch.setattr(remote, "_put", failing)
    with pytest.raises(InputError, match="the network is gone"):
        make(url)
    assert files_in(remote.local_folder(url)) == {}
    assert MANIFEST not in "".join(files_at(url))
    monkeypatch.setattr(remote, "_put", put)
    make(url)
    assert files_at(url) == files_in(remote.local_folder(url))


def test_artifact_removed_or_rebuilt_elsewhere_is_dropped_from_the_cache(url, another_machine, monkeypatch) -> None:
    make(url)
    first = remote.local_folder(url)
    another_machine()
    remote.pull(remote.local_folder(url))
    remove(remote.local_folder(url) / "chunks" / "00000")
    assert list(files_at(url)) == [MANIFEST]
    remote.pull(first)
    assert list(files_in(first)) == [MANIFEST]
    make(url, recipe(epochs=2), ROWS[::-1])
    other = remote.local_folder(url)
    monkeypatch.setenv("RETRO_CACHE", str(next(path for path in first.parents if path.name.startswith("cache-"))))
    remote.pull(first)
    assert is_finished(first / "chunks" / "00000", recipe(epochs=2))
    assert np.array_equal(np.load(remote.present(first / "chunks" / "00000" / "train" / "tokens.npy")), ROWS[::-1])
    assert files_in(first).items() <= files_in(other).items()


def test_refresh_drops_changed_artifacts_and_keeps_the_others(url, another_machine) -> None:
    folder = remote.local_folder(url)
    for name in ("kept", "changed"):
        with create(folder / name, recipe(name=name)) as (work, _):
            (work / "x").write_text(name)
    write_datastore_manifest(folder, {"number": 1})
    another_machine()
    reader = remote.local_folder(url)
    remote.refresh(reader)
    for name in ("kept", "changed"):
        remote.present(reader / name)
    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.pipe_file(f"{root}/changed/{MANIFEST}", b'{"files": {}}')
    remote.refresh(reader)
    assert (reader / "changed" / "x").exists()  # the datastore's manifest is unchanged
    filesystem.pipe_file(f"{root}/{MANIFEST}", b'{"number": 2}')
    remote.refresh(reader)
    assert (reader / "kept" / "x").exists()
    assert not (reader / "changed").exists()


def test_missing_datastore_or_artifact_is_reported_with_its_url(url) -> None:
    with pytest.raises(InputError, match=r"wiki/manifest\.json is missing"):
        Datastore.open(url)
    assert not remote.local_folder(url).exists()
    make(url)
    with pytest.raises(InputError, match=r"wiki/embedder is not part of anything finished"):
        remote.present(remote.local_folder(url) / "embedder")


def test_unreachable_url_is_reported(another_machine, monkeypatch) -> None:
    with pytest.raises(InputError, match=r"nonsense://a/b/manifest\.json: ValueError: Protocol not known.*pip install"):
        Datastore.open("nonsense://a/b")
    with pytest.raises(InputError, match=r"http://127\.0\.0\.1:9/wiki/manifest\.json: Client"):
        Datastore.open("http://127.0.0.1:9/wiki")


def test_missing_bucket_is_refused_and_not_created(bucket) -> None:
    with pytest.raises(InputError, match="no-such-bucket"):
        make("s3://no-such-bucket/wiki")
    assert not fsspec.filesystem("s3").exists("no-such-bucket")


@pytest.mark.parametrize("configured", [None, 3])
def test_s3_answers_many_ranges_at_a_time_unless_configured(bucket, monkeypatch, configured: int | None) -> None:
    if configured:
        options = {"config_kwargs": {"max_pool_connections": configured}}
        monkeypatch.setitem(fsspec.config.conf, "s3", options)
    with remote._asking(bucket) as (filesystem, _):
        assert filesystem.config_kwargs == {"max_pool_connections": configured or 64}


LEADING_OUT = ["../evil", "train/../../../evil", "/tmp/evil", "train//evil", "./evil", "..\\evil", "C:/evil", "s3:/evil", "", "a\0b"]  # fmt: skip


@pytest.mark.parametrize("name", LEADING_OUT)
def test_file_that_leads_out_of_its_artifact_is_refused_and_not_fetched(url, another_machine, name) -> None:
    folder = make(url)
    manifest = read_checked(folder / MANIFEST)
    entry = manifest["files"].pop("documents.txt")
    manifest["files"][name] = entry
    write_checked(folder / MANIFEST, manifest)
    remote.publish_file(folder / MANIFEST)
    cache = another_machine()
    folder = remote.local_folder(url) / "chunks" / "00000"
    with pytest.raises(InputError, match="is not the name of a file"):
        remote.present(folder)
    with pytest.raises(InputError):
        read_manifest(folder)
    assert {path.name for path in cache.rglob("*") if path.is_file()} == {MANIFEST, ".fetch.lock"}


def test_file_is_not_fetched_through_a_link_that_leads_out_of_its_artifact(url, another_machine, tmp_path) -> None:
    make(url)
    another_machine()
    folder, other = remote.local_folder(url) / "chunks" / "00000", tmp_path / "other"
    folder.mkdir(parents=True)
    other.mkdir()
    (folder / "train").symlink_to(other)
    with pytest.raises(InputError, match="is a link out of"):
        remote.present(folder / "train" / "tokens.npy")
    assert not list(other.iterdir())


@pytest.mark.parametrize(
    "link", ["../../victim/manifest.json", "a/../../../victim/manifest.json", "/victim/manifest.json"]
)
def test_listing_of_a_server_writes_nothing_outside_of_the_datastore(another_machine, link: str) -> None:
    class Lying(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_listing = self.path.rstrip("/") == "/some/wiki"
            address = f"http://{self.headers['Host']}/some/wiki/{link}" if link[0] != "/" else link
            body = f'<a href="{address}">x</a><a href="manifest.json">x</a>' if is_listing else "{}"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Lying) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        cache = another_machine()
        folder = remote.local_folder(f"http://127.0.0.1:{server.server_port}/some/wiki")
        with contextlib.suppress(InputError):
            remote.pull(folder)
        server.shutdown()
    outside = [path for path in (*cache.rglob("*"), *cache.parent.glob("victim/*")) if path.is_file()]
    assert all(path.is_relative_to(folder) for path in outside)
