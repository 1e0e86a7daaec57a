"""`hf://` URLs name files of the Hugging Face hub, here of a server in this process that answers as the hub does."""

import io
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from indexing.corpus.documents import CorpusSettings
from indexing.corpus.scan import list_files, read_slice, scan_file, strict_problem

pytest.importorskip("huggingface_hub")
TEXTS = [f"text {number}" for number in range(500)]


def parquet(texts: list[str]) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), stream, row_group_size=100)
    return stream.getvalue()


FILES = {
    "README.md": b"The card of the dataset.",
    "data/train-00000-of-00002.parquet": parquet(TEXTS[:300]),
    "data/train-00001-of-00002.parquet": parquet(TEXTS[300:]),
    "extra/d.csv": b"text\na row\n",
}


class Hub(BaseHTTPRequestHandler):
    """The parts of the hub's API that `HfFileSystem` reads, for the dataset `owner/name`."""

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlparse(self.path)
        path = unquote(url.path)
        if match := re.match(r"/datasets/owner/name/resolve/(?:main|refs/convert/parquet)/(.*)", path):
            start, stop = self.headers["Range"].removeprefix("bytes=").split("-")
            self.answer(FILES[match[1]][int(start) : int(stop) + 1], 206)
        elif match := re.match(r"/api/datasets/owner/name/tree/(?:main|refs/convert/parquet)/?(.*)", path):
            self.answer(self.tree(match[1], parse_qs(url.query)["recursive"] == ["true"]))
        else:
            self.answer({"id": "owner/name", "sha": "a" * 40})

    def tree(self, folder: str, is_recursive: bool) -> list[dict[str, Any]]:
        files = {
            path: {"type": "file", "path": path, "size": len(data), "oid": "b" * 40} for path, data in FILES.items()
        }
        folders = {path: {"type": "directory", "path": path, "oid": "c" * 40} for path in ("data", "extra")}
        prefix = f"{folder}/" if folder else ""
        below = {path: entry for path, entry in (folders | files).items() if path.startswith(prefix)}
        return [entry for path, entry in below.items() if is_recursive or "/" not in path.removeprefix(prefix)]

    def answer(self, body: Any, status: int = 200) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    options = {"endpoint": f"http://127.0.0.1:{server.server_port}", "skip_instance_cache": True, "token": False}
    monkeypatch.setitem(fsspec.config.conf, "hf", options)
    yield
    server.shutdown()
    server.server_close()
    thread.join()


TRAIN = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("hf://datasets/owner/name", ["README.md", *TRAIN, "extra/d.csv"]),
        ("hf://datasets/owner/name/**/*.parquet", TRAIN),
        (
            "hf://datasets/owner/name@refs/convert/parquet/data/*.parquet",
            [name.removeprefix("data/") for name in TRAIN],
        ),
        ("hf://datasets/owner/name/data", [name.removeprefix("data/") for name in TRAIN]),
        ("hf://datasets/owner/name/extra/d.csv", ["d.csv"]),
    ],
)
def test_a_name_on_the_hub_gives_the_files_of_the_dataset(url: str, names: list[str]) -> None:
    settings = CorpusSettings(paths=(url,), shard_bytes=1000)
    files = list_files(settings)
    assert [file.name for file in files] == names
    texts = []
    for file in files:
        slices = scan_file(file, settings).slices
        texts += [each.text for part in slices for each in read_slice(part, settings, strict_problem)]
    train = TEXTS if len(names) > 1 else []
    assert texts == ["The card of the dataset."] * ("README.md" in names) + train + ["a row"] * ("d.csv" in names[-1])
    assert all(file.size and file.modified == "b" * 40 for file in files)
