"""`[dedup]` in the chunk stage: removed documents are listed, training excludes evaluation texts, builds resume."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing.corpus.documents import CorpusSettings
from indexing.corpus.scan import split_of
from indexing.dedup.near_duplicates import DedupSettings
from indexing.store.datastore import SPLITS, Datastore
from indexing.store.errors import InputError
from indexing.tokenization.settings import TokenizerSettings
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.config import Config
from pipelines.stages import dedup as dedup_stage
from tests.conftest import build_local, contents, tiny_config
from tests.indexing.corpus.test_megatron import write_megatron
from tests.indexing.verification.contents import check_contents

SPLIT = (800, 100, 100)


def english(seed: int) -> str:
    return " ".join(f"w{number}" for number in np.random.default_rng(seed).integers(0, 10**6, 150))


def chinese(seed: int) -> str:
    return "".join(chr(0x4E00 + number) for number in np.random.default_rng(seed).integers(0, 2000, 300)) + "。"


def rewritten(text: str) -> str:
    """A near copy with other spaces and punctuation, and another end."""
    words = text.split()
    return ("  ".join(words[:-3]) if len(words) > 1 else text[:-4]) + " —\n"


def write(path: Path, texts: list[str]) -> Path:
    lines = (json.dumps({"id": f"{path.stem}-{n}", "text": text}) for n, text in enumerate(texts))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def texts_by_split(number: int) -> dict[str, list[str]]:
    """`number` texts, alternately English and Chinese, grouped by the split they are assigned to."""
    out: dict[str, list[str]] = {name: [] for name in SPLITS}
    for seed in range(number):
        text = (english, chinese)[seed % 2](seed)
        out[split_of(text, SPLIT)].append(text)
    return out


def training_copy(text: str) -> str:
    """A near copy of a text that is assigned to `train`."""
    candidates = (rewritten(text) + f" {number}" for number in range(1000))
    return next(copy for copy in candidates if split_of(copy, SPLIT) == "train")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, list[str]]]:
    """A corpus with near copies of its own documents and of an evaluation set; that set; the copies by reason."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = texts_by_split(140)
    secret = [english(9001), chinese(9002)]
    copies = {
        "near train": [training_copy(text) for text in texts["train"][4:9]],
        "near valid": [training_copy(text) for text in texts["valid"][:2]],
        "near test": [training_copy(text) for text in texts["test"][:2]],
        "near evaluation": [training_copy(text) for text in secret],
    }
    # Copies of held-out documents come before the originals, so the order in the corpus cannot be the deciding factor.
    early = copies["near valid"] + copies["near test"]
    everything = [*early, *texts["train"], *texts["valid"], *texts["test"], *copies["near train"]]
    path = write(folder / "corpus.jsonl", everything + copies["near evaluation"])
    return path, write(folder / "evaluation.jsonl", secret), copies


def made(datastore: Path) -> dict[str, bytes]:
    """The files that depend on `[dedup]`."""
    return {name: data for name, data in contents(datastore).items() if name.startswith(("dedup/", "chunks/"))}


def config_of(folder: Path, corpus: Path, **dedup) -> Config:
    read = CorpusSettings(paths=(str(corpus),), shard_bytes=30_000, split=SPLIT)
    return tiny_config(folder, corpus, corpus=read, dedup=DedupSettings(**dedup))


def everything(evaluation: Path) -> dict:
    return {"within": True, "held_out": True, "paths": (str(evaluation),)}


def removed_rows(config: Config) -> list[dict]:
    lines = (config.datastore / "dedup" / "removed" / "removed.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def ids(datastore: Datastore, split: str) -> list[str]:
    part = datastore.split(split)
    return [row["id"] for row in part.metadata(range(sum(part.document_rows)))]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, corpus) -> tuple[Config, Datastore]:
    """The whole corpus, built through every stage with all of `[dedup]` on. Read-only."""
    config = config_of(tmp_path_factory.mktemp("built"), corpus[0], **everything(corpus[1]))
    return config, build_local(config)


def test_exactly_the_near_copies_are_removed_and_listed_with_their_originals(built, corpus) -> None:
    config, _ = built
    texts = [json.loads(line)["text"] for line in corpus[0].read_text().splitlines()]
    expected = {(texts.index(copy), reason) for reason, copies in corpus[2].items() for copy in copies}
    rows = removed_rows(config)
    assert {(row["line"] - 1, row["reason"]) for row in rows} == expected
    assert [row["line"] for row in rows] == sorted(row["line"] for row in rows)
    for row in rows:
        assert row["id"] == f"corpus-{row['line'] - 1}"
        assert row["near_id"].startswith("evaluation-" if row["reason"] == "near evaluation" else "corpus-")
        assert row["near_file"] == ("evaluation.jsonl" if row["reason"] == "near evaluation" else "corpus.jsonl")
        assert 0.8 <= row["jaccard"] < 1


def test_removed_documents_are_in_no_chunk_and_all_others_are_kept(built, corpus, tmp_path) -> None:
    config, datastore = built
    check_contents(datastore)
    gone = {row["id"] for row in removed_rows(config)}
    plain = build_local(config_of(tmp_path, corpus[0]), only="chunk")
    assert ids(datastore, "train") == [name for name in ids(plain, "train") if name not in gone]
    assert len(ids(datastore, "train")) == len(ids(plain, "train")) - len(gone)
    for split in ("valid", "test"):
        assert ids(datastore, split) == ids(plain, split)


def test_datastore_without_dedup_does_not_depend_on_its_settings(corpus, tmp_path, built) -> None:
    """Other settings of `[dedup]` have no effect while it is off. Corpus and tokenizer never depend on it."""
    plain, other = config_of(tmp_path / "a", corpus[0]), config_of(tmp_path / "b", corpus[0], ngram=5, threshold=0.5)
    build_local(plain, only="chunk")
    build_local(other, only="chunk")
    assert contents(plain.datastore) == contents(other.datastore)
    assert not (plain.datastore / "dedup").exists()
    manifest = json.loads((plain.datastore / "chunks" / "00000" / "manifest.json").read_text())
    assert set(manifest["recipe"]["inputs"]) == {"corpus", "tokenizer"}
    assert not [key for key in manifest["recipe"]["settings"] if key.startswith("dedup")]
    theirs = contents(built[0].datastore)
    shared = {
        name: data for name, data in contents(plain.datastore).items() if name.startswith(("corpus/", "tokenizer/"))
    }
    assert shared.items() <= theirs.items()


@pytest.mark.parametrize("stop", ["sign_task", "candidate_task", "gram_task", "remove_task"])
def test_restarted_dedup_keeps_finished_artifacts_and_gives_the_same_bytes(
    built, corpus, tmp_path, monkeypatch, stop
) -> None:
    config = config_of(tmp_path, corpus[0], **everything(corpus[1]))
    task, calls = getattr(dedup_stage, stop), 0

    def dies(*arguments, **keywords) -> object:
        nonlocal calls
        calls += 1
        if calls == (2 if stop in ("sign_task", "gram_task") else 1):
            raise KeyboardInterrupt
        return task(*arguments, **keywords)

    monkeypatch.setattr(dedup_stage, stop, dies)
    with pytest.raises(KeyboardInterrupt):
        build_local(config, only="chunk")
    monkeypatch.undo()
    folder = config.datastore / "dedup" / "signatures"
    times = {path: path.stat().st_mtime_ns for path in folder.glob("*/manifest.json")}
    assert times
    build_local(config, only="chunk")
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert made(config.datastore) == made(built[0].datastore)
    assert sorted(path.name for path in (config.datastore / "dedup").iterdir()) == [
        "evaluation",
        "removed",
        "signatures",
    ]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"threshold": 0.9}, "dedup.threshold was 0.8, now 0.9"),
        ({"within": False, "held_out": False, "paths": ()}, "dedup.ngram was 13, now 'not set'"),
    ],
)
def test_changed_dedup_setting_is_refused_by_name_before_any_work(built, change, named) -> None:
    config = built[0]
    before = contents(config.datastore)
    with pytest.raises(InputError, match="--rebuild") as caught:
        build_local(replace(config, dedup=replace(config.dedup, **change)), only="chunk")
    assert named in str(caught.value)
    assert contents(config.datastore) == before


def test_enabling_dedup_for_a_finished_datastore_needs_a_rebuild(built, corpus, tmp_path) -> None:
    config = config_of(tmp_path, corpus[0])
    build_local(config, only="chunk")
    changed = replace(config, dedup=built[0].dedup)
    with pytest.raises(InputError, match=r"dedup\.ngram was 'not set', now 13"):
        build_local(changed, only="chunk")
    assert not (config.datastore / "dedup" / "signatures").exists()
    build_local(changed, only="chunk", rebuild=True)
    assert len(removed_rows(changed)) == len(removed_rows(built[0]))
    build_local(config, only="chunk", rebuild=True)
    assert not (config.datastore / "dedup").exists()


def test_edited_evaluation_file_is_refused(built, corpus, tmp_path) -> None:
    copy = shutil.copy(corpus[1], tmp_path / "evaluation.jsonl")
    config = replace(built[0], dedup=replace(built[0].dedup, paths=(str(copy),)))
    build_local(config, only="chunk")  # the same file at another path
    write(copy, [english(9003)])
    with pytest.raises(InputError, match=r"its input 'evaluation\.jsonl' has changed"):
        build_local(config, only="chunk")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"dedup\.paths: '.*missing\.jsonl' does not exist"),
        ('{"question": "?"}\n', r"dedup\.paths = .* no document with text"),
    ],
)
def test_unusable_evaluation_file_is_refused(corpus, tmp_path, content, message) -> None:
    path = tmp_path / "missing.jsonl"
    if content:
        path.write_text(content)
    config = config_of(tmp_path, corpus[0], paths=(str(path),))
    with pytest.raises(InputError, match=message):
        build_local(config, only="chunk")
    assert not (config.datastore / "chunks").exists()


def test_problems_of_an_evaluation_file_are_reported(corpus, tmp_path, caplog) -> None:
    path = write(tmp_path / "e.jsonl", [english(9001)])
    path.write_text(path.read_text() + "{broken\n")
    with caplog.at_level(logging.WARNING, "retro"):
        build_local(config_of(tmp_path, corpus[0], paths=(str(path),)), only="chunk")
    assert any("evaluation: broken JSON: 1" in message and ":2:" in message for message in caplog.messages)


def test_corpus_equal_to_the_evaluation_set_is_refused_with_the_reason(corpus, tmp_path) -> None:
    config = config_of(tmp_path, corpus[0], paths=(str(corpus[0]),))
    with pytest.raises(InputError, match=r"removed (\d+) of \1 .*\(\1 near evaluation\)"):
        build_local(config, only="chunk")


def test_shard_without_remaining_documents_passes_every_stage(tmp_path) -> None:
    texts = [english(seed) for seed in range(60)]
    config = config_of(tmp_path, write(tmp_path / "c.jsonl", texts + texts + texts), within=True)
    config = replace(config, corpus=replace(config.corpus, split=(1, 0, 0)))
    datastore = build_local(config)
    assert ids(datastore, "train") == [f"c-{number}" for number in range(60)]
    assert 0 in datastore.train.document_rows
    assert datastore.has("neighbors")


def test_documents_stored_as_tokens_are_compared_by_their_text(built, corpus, tmp_path) -> None:
    """The corpus is stored as tokens, the evaluation set as text: the same documents are removed."""
    config, datastore = built
    existing = TokenizerSettings(kind="sentencepiece", path=str(datastore.folder / "tokenizer" / "sentencepiece.model"))
    tokenizer = Tokenizer.open(datastore.folder / "tokenizer")
    texts = [json.loads(line)["text"] for line in corpus[0].read_text().splitlines()]
    path = write_megatron(tmp_path / "corpus.bin", [[tokenizer.encode(text).tolist()] for text in texts])
    stored = replace(config_of(tmp_path, path, **everything(corpus[1])), tokenizer=existing)
    again = build_local(stored, only="chunk")
    assert [(row["line"], row["reason"]) for row in removed_rows(stored)] == [
        (row["line"], row["reason"]) for row in removed_rows(config)
    ]
    assert again.train.num_documents == datastore.train.num_documents
