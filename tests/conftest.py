"""Shared fixtures: a tiny corpus, a tiny datastore and a tiny model."""

import atexit
import itertools
import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from indexing.corpus.documents import CorpusSettings
from indexing.embedding.settings import EmbedderSettings
from indexing.neighbors.settings import NeighborSettings
from indexing.retrieval.retriever import Retriever
from indexing.store.checked_files import cache_folder
from indexing.store.datastore import Datastore, read_datastore_manifest, write_datastore_manifest
from indexing.store.files import checksum, read_json, write_checked
from indexing.tokenization.settings import TokenizerSettings
from pipelines.config import Config
from pipelines.executors.factory import make_executor
from pipelines.executors.settings import ExecutorSettings
from pipelines.stages.table import STAGES, build
from retro.data.settings import DataSettings
from retro.model.datastore_fit import fit_to
from retro.model.retro import Retro
from retro.model_settings import (
    NO_COPY_HEAD,
    AttentionSettings,
    CopyHeadSettings,
    EncoderSettings,
    ModelSettings,
    RetrievalSettings,
)
from retro.training import meter
from retro.training.settings import TrainSettings
from tests.planted import write_planted


@pytest.fixture
def not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are used without a look at their checksums, as large ones are until a thread has compared them."""
    monkeypatch.setattr("indexing.store.mapped.first_use", lambda file: file)


PATIENCE = 600
"""Seconds that a test waits for a process or a thread. Only a hang takes this long, even on a busy machine."""

USERS_CACHE = cache_folder()
"""For models that tests may have downloaded before."""

# Tests remember nothing about their files in the user's cache.
os.environ["RETRO_CACHE"] = tempfile.mkdtemp(prefix="retro-cache-")
atexit.register(shutil.rmtree, os.environ["RETRO_CACHE"], ignore_errors=True)

# Property tests have no time limit, neither for an example nor for drawing it.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# Tests interrupt their own process and its children. A shell that starts pytest in the background disables SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests kill processes, never the machine. Half of the time of a tiny datastore's build is the disk's.
os.fsync = lambda descriptor: None

# Builds set the threads of torch for the whole process. With one thread, results do not depend on the tests before, and no test
# waits for a second core.
torch.set_num_threads(1)

# Tests compare no utilization. The measurement of the peak takes a second of a CPU, in every process that trains.
meter.peak_of_process = lambda placement: 1e12

# Ray reads its token once per process, so all tests that start a cluster share one.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=uuid.uuid4().hex)
# Seconds that a cluster waits for its own processes; the defaults are 30 and 60.
os.environ.update(
    RAY_DASHBOARD_STARTUP_TIMEOUT_S=str(PATIENCE),
    RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT=str(PATIENCE),
    RAY_agent_register_timeout_ms=str(1000 * PATIENCE),
    RAY_worker_register_timeout_seconds=str(PATIENCE),
    RAY_raylet_start_wait_time_s=str(PATIENCE),
    RAY_worker_niceness="0",  # the default, 15, starves workers on a busy machine
)

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

_WORDS = """
    the a of to and in is it that for on with as was at by from or an be this which are not have has had but
    were they index chunk token neighbor vector search model train loss gradient layer head shard store
    retrieve document memory 检索 模型 训练 数据 向量 分片 文档 邻居
""".split()  # noqa: SIM905


def write_corpus(path: Path, num_documents: int, seed: int = 0, num_paragraphs: int = 0) -> Path:
    """Write documents of random sentences as JSON Lines. Many share whole paragraphs, so retrieval finds matches.

    A document has one to five of `num_paragraphs` paragraphs; 0 makes one for three documents.
    """
    rng = np.random.default_rng(seed)
    num_paragraphs = num_paragraphs or max(4, num_documents // 3)
    paragraphs = [" ".join(rng.choice(_WORDS, 60)) + ".\n" for _ in range(num_paragraphs)]
    with open(path, "w", encoding="utf-8") as file:
        for number in range(num_documents):
            parts = [paragraphs[i] for i in rng.integers(0, len(paragraphs), rng.integers(1, 6))]
            text = f"# Document {number}\n\n" + "".join(parts) + "\tif x == 1:\n\t\treturn 2\n"
            file.write(json.dumps({"id": f"doc-{number}", "text": text, "title": f"Title {number}"}) + "\n")
    return path


def write_byte_tokenizer(folder: Path, special: Sequence[str], **config: str) -> None:
    """Write a Hugging Face tokenizer with the 256 bytes of GPT-2, no merges, and special tokens after them.

    `config` is the content of its `tokenizer_config.json`; without any, it has no such file.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def tiny_config(folder: Path, corpus_path: Path, **changes) -> Config:
    """Settings for builds of one second: several shards, 16-token chunks, exact index, and no `votes`, which take half a second more."""
    config = Config(
        datastore=folder / "datastore",
        skip_stages=("suffixes", "votes"),
        run=folder / "run",
        corpus=CorpusSettings(paths=(str(corpus_path),), shard_bytes=30_000, split=(900, 100, 0)),
        tokenizer=TokenizerSettings(vocab_size=400),
        chunks=replace(Config().chunks, chunk_length=16),
        embedder=EmbedderSettings(dimension=32, bigram_buckets=1024),
        neighbors=NeighborSettings(stored=6, candidates=24, rerank="embeddings", search="exact"),
        executor=ExecutorSettings(workers=1, num_threads=1),
        data=DataSettings(sequence_length=64, k=2),
        model=ModelSettings(
            d_model=32,
            d_ffw=64,
            attention=AttentionSettings(num_heads=2, head_dim=16),
            num_layers=3,
            retrieval=RetrievalSettings(cca_layers=(2, 3)),
            encoder=EncoderSettings(d_model=16, d_ffw=32, num_heads=1, head_dim=16, num_layers=1),
            copy_head=NO_COPY_HEAD,
        ),
        train=TrainSettings(
            steps=8,
            batch_size=2,
            warmup_steps=2,
            eval_every=4,
            eval_tokens=500,
            checkpoint_every=4,
            log_every=1,
            device="cpu",
        ),
    )
    return replace(config, **changes)


def build_local(config: Config, **options) -> Datastore:
    """Build the datastore in this process."""
    return build(config, make_executor(config.executor), **options)


def change_tokenizer(datastore: Path) -> None:
    """Make a copy of a datastore one with another tokenizer of the same size: one byte of its tokens differs."""
    folder = datastore / "tokenizer"
    data = bytearray((folder / "token_bytes.npy").read_bytes())
    data[-1] ^= 1
    (folder / "token_bytes.npy").write_bytes(data)
    manifest = read_json(folder / "manifest.json")
    manifest["files"]["token_bytes.npy"]["checksum"] = checksum(folder / "token_bytes.npy")
    write_checked(folder / "manifest.json", manifest)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on machines without a GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def wait_until(found: Callable[[], Any], every: float = 0.01) -> Any:
    """Call `found` until its answer is true, and return that answer. Fails after `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    while not (answer := found()):
        assert time.monotonic() < deadline, f"waited {PATIENCE} s"
        time.sleep(every)
    return answer


def once_logged(caplog: pytest.LogCaptureFixture, text: str, act: Callable[[], object]) -> threading.Thread:
    """Start a thread that calls `act` once a text is logged, or after `PATIENCE` without it."""

    def watch() -> None:
        try:
            wait_until(lambda: text in caplog.text)
        finally:
            act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def at_operation(number: int, folder: Path, act: Callable[[], object]) -> None:
    """Call `act` in this process just before the n-th operation that changes a folder.

    Operations are files opened for writing, and files and folders created, renamed or removed below the folder.
    Kills are placed by such counts and not by seconds, so they happen at the same point on any machine.
    """
    counted = itertools.count(1)
    changes = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link"}

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in changes and not (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        if str(arguments[0]).startswith(f"{folder}{os.sep}") and next(counted) == number:
            act()

    sys.addaudithook(heard)


def kill_itself() -> None:
    """End this process without cleanup, as a power failure does."""
    os.kill(os.getpid(), signal.SIGKILL)


def forkserver() -> ForkServerContext:
    """Start processes as forks of one that has already imported torch and the project: the import takes seconds.

    All tests share this server process. It imports the modules of the first list it receives, so there is only one list.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.conftest", "retro.training.trainer", "torch._dynamo"])
    return context


# One artifact of each kind in the tiny datastore, in the order of making.
ARTIFACTS = ["corpus", "tokenizer", "chunks/00001", "embedder", "embeddings/00003", "index/trained", "index/00002", "index/tuned", "neighbors/00004"]  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a datastore except the reports, which contain times."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith("report.")
    }


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every prompt have earned trust in retrieval, also from gates that copy without a match."""
    monkeypatch.setattr("retro.copying.step_votes.StepVotes.trust", lambda *_: (0.97, 0.01, 0.01, 0.01))


@pytest.fixture(autouse=True)
def _same_process() -> Iterator[None]:
    """Undo the changes of the command line to the project's logger, and of a build to the threads of torch."""
    yield
    torch.set_num_threads(1)
    log = logging.getLogger("retro")
    log.handlers.clear()
    log.propagate = True


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 short documents in English, Chinese and code, in one JSON Lines file."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", 200)


@pytest.fixture(scope="session")
def tiny_datastore(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Datastore:
    """A finished datastore of `tiny_corpus` in several shards. Read-only."""
    return build_local(tiny_config(tmp_path_factory.mktemp("tiny"), tiny_corpus))


@pytest.fixture(scope="session")
def retriever(tiny_datastore: Datastore) -> Retriever:
    """Searches `tiny_datastore`. Read-only."""
    return Retriever.open(tiny_datastore.folder)


@pytest.fixture(scope="session")
def voting_datastore(
    tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, tiny_datastore: Datastore
) -> Datastore:
    """`tiny_datastore` with the stages `suffixes` and `votes`. Read-only."""
    folder = tmp_path_factory.mktemp("voting")
    config = tiny_config(folder, tiny_corpus, skip_stages=())
    shutil.copytree(tiny_datastore.folder, config.datastore)
    return build_local(config)


def without_stages(datastore: Datastore, folder: Path, *stages: str) -> Datastore:
    """Copy a datastore without some stages, which are not finished in the copy and have no files."""
    shutil.copytree(datastore.folder, folder)
    manifest = read_datastore_manifest(folder)
    for stage in stages:
        del manifest["fingerprints"][stage], manifest["artifacts"][stage]
        for path in (path for output in STAGES[stage].outputs for path in folder.glob(output)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    manifest.pop("extra_datastores", None)
    write_datastore_manifest(folder, manifest)
    return Datastore.open(folder)


@pytest.fixture(scope="session")
def copying_datastore(tmp_path_factory: pytest.TempPathFactory, voting_datastore: Datastore) -> Datastore:
    """`voting_datastore` without embeddings, index and neighbors: it has `chunk`, `sparse`, `suffixes` and `votes`. Read-only."""
    return without_stages(
        voting_datastore, tmp_path_factory.mktemp("copying") / "datastore", "embed", "train-index", "add", "neighbors"
    )


@pytest.fixture(scope="session")
def copying_run(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, copying_datastore: Datastore) -> Path:
    """A run on `copying_datastore` of a model that copies from the whole datastore only. Read-only."""
    from retro.training.trainer import train

    config = replace(tiny_config(tmp_path_factory.mktemp("run"), tiny_corpus), datastore=copying_datastore.folder)
    copying = CopyHeadSettings(context=False, neighbors=False, datastore=True)
    model = replace(config.model, retrieval=replace(config.model.retrieval, cca_layers=()), copy_head=copying)
    train(config.run, replace(config, model=model).run_settings)
    return config.run


@pytest.fixture(scope="session")
def planted_datastore(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    """A datastore with the stages `suffixes` and `votes`, in which held-out documents copy passages (`tests/planted.py`). Read-only."""
    folder = tmp_path_factory.mktemp("planted")
    config = tiny_config(folder, write_planted(folder / "corpus.jsonl"))
    for stage in ("chunk", "suffixes"):
        build_local(config, only=stage)
    return build_local(config, only="votes")


@pytest.fixture(scope="session")
def tiny_model(tiny_datastore: Datastore) -> Retro:
    """A RETRO model with random weights that fits `tiny_datastore`. Read-only."""
    torch.manual_seed(0)
    settings = tiny_config(Path("unused"), Path("unused")).model
    return Retro(fit_to(settings, tiny_datastore.manifest, tiny_datastore.folder))


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, tiny_datastore: Datastore) -> Path:
    """A run of eight steps on `tiny_datastore`, with its checkpoints. The model copies from context and neighbors. Read-only."""
    from retro.training.trainer import train

    config = replace(tiny_config(tmp_path_factory.mktemp("run"), tiny_corpus), datastore=tiny_datastore.folder)
    copying = CopyHeadSettings(context=True, neighbors=True, datastore=False)
    config = replace(config, model=replace(config.model, copy_head=copying))
    train(config.run, config.run_settings)
    return config.run


_S3_SERVER = """
import threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="0.0.0.0", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The endpoint of an S3 server that runs in its own process."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    pipes: dict[str, int] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", _S3_SERVER], text=True, **pipes) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


@pytest.fixture
def another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """A function that simulates a move to another machine: it makes the cache of remote files a new, empty folder."""

    def go() -> Path:
        monkeypatch.setenv("RETRO_CACHE", str(tmp_path / f"cache-{uuid.uuid4().hex[:8]}"))
        return Path(os.environ["RETRO_CACHE"])

    go()
    return go


@pytest.fixture
def bucket(s3_server: str, another_machine: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new, empty S3 bucket."""
    return new_bucket(s3_server, monkeypatch)


def new_bucket(server: str, patch: pytest.MonkeyPatch) -> str:
    """Make an S3 bucket, and name its server and credentials in environment variables; return its URL."""
    import fsspec

    patch.setenv("AWS_ENDPOINT_URL", server)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        patch.setenv(name, "test")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    name = f"bucket-{uuid.uuid4().hex}"
    fsspec.filesystem("s3").mkdir(name)
    return f"s3://{name}"
