"""The second step of the `chunk` stage: the tokenizer, trained on a sample of the corpus, or copied from
`tokenizer.path`."""

from collections.abc import Iterator
from pathlib import Path

from indexing.corpus.documents import CorpusFile, CorpusSettings
from indexing.corpus.megatron import is_megatron
from indexing.corpus.scan import read_slice, split_of_document
from indexing.progress import Advance
from indexing.store.artifact import Recipe, create, fingerprint, is_finished, read_manifest
from indexing.store.errors import InputError
from indexing.store.files import checksum
from indexing.tokenization.installation import install_tokenizer
from indexing.tokenization.training import train_sentencepiece
from pipelines.config import Config
from pipelines.executors.tasks import Executor
from pipelines.stages.generations import plan_of
from pipelines.stages.shards import finished, prefixed
from pipelines.terminal.progress import progress


def require_tokenizer(config: Config, files: list[CorpusFile]) -> None:
    """Reject training a tokenizer if some of the corpus is stored as tokens of another one."""
    tokens = next((file for file in files if is_megatron(file.name)), None)
    if tokens is not None and config.tokenizer.is_trained:
        raise InputError(
            f"tokenizer.kind = '{config.tokenizer.kind}' is trained on text, but {tokens.path} holds tokens. Set "
            "tokenizer.kind to 'sentencepiece' or 'huggingface', and tokenizer.path to the tokenizer that made them."
        )


def make_tokenizer(config: Config, executor: Executor) -> None:
    """Train the tokenizer on a sample of the training documents, or copy the one at `tokenizer.path`."""
    folder, settings = config.datastore, config.tokenizer
    values = prefixed("tokenizer", settings)
    if settings.is_trained:
        recipe = Recipe(
            "chunk", 1, values | {"corpus.split": config.corpus.split}, {"corpus": finished(folder, "corpus")}
        )
    else:
        recipe = Recipe("chunk", 1, values, {"tokenizer.path": _checksum_of(Path(settings.path))})
    if is_finished(folder / "tokenizer", recipe):
        return
    with create(folder / "tokenizer", recipe) as (work, _):
        if settings.is_trained:
            total = read_manifest(folder / "corpus")["counts"]["bytes"]
            executor.expect(total)  # training takes one core
            with progress("tokenizer", total=total, unit="bytes") as advance:
                train_sentencepiece(_training_texts(config, advance), settings, work)
        else:
            install_tokenizer(settings, work)


def _training_texts(config: Config, advance: Advance) -> Iterator[str]:
    """The text of every training document, in order, large ones in blocks. The tokenizer does not see held-out
    documents either."""
    empty = True
    for shard in plan_of(config.datastore / "corpus"):
        for file_slice in shard:
            for document in read_slice(file_slice, config.corpus, on_problem=lambda _: None):
                if split_of_document(document, config.corpus.split) == "train":
                    yield from document.blocks()
                    empty = False
                advance(document.size)
    if empty:
        raise nothing_left(config.corpus)


def nothing_left(settings: CorpusSettings) -> InputError:
    """The error if all documents are held out."""
    return InputError(
        f"corpus.split = {settings.split}: every document is held out and none is left for training and the index; "
        "raise the first weight ((1, 0, 0) holds out none) and add `--rebuild`."
    )


def _checksum_of(path: Path) -> str:
    if path.is_file():
        return checksum(path)
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    return fingerprint([checksum(path / name) for name in names if (path / name).is_file()])
