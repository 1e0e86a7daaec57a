"""Scores of `retrieval_gain`: each run once, the same figures as `retro eval perplexity --against`, and their summary."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common import Budget
from benchmarks.quality import retrieval_gain, retrieval_scores
from benchmarks.quality.retrieval_scores import Scores, load, load_all, save, score_runs
from benchmarks.quality.retrieval_summary import bits_table, changes_table, leakage_table, summarize
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import CHUNK_ID_BITS
from pipelines.cli import main
from pipelines.settings.toml_file import to_toml
from retro.evaluation.bits_per_byte import ChunkScores, SetResult
from retro.model.settings import updated
from tests.conftest import build_local, tiny_config

ORDER = ("baseline", "context", "copy")


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Path:
    """A folder as `retrieval_gain train` leaves it: two finished runs, and one with an earlier checkpoint only."""
    out = tmp_path_factory.mktemp("experiment")
    config = tiny_config(out, tiny_corpus)
    config = replace(config, datastore=out / "lexical", neighbors=replace(config.neighbors, stored=16))
    build_local(config)
    copying = {"copy_head.context": True, "copy_head.neighbors": True, "retrieval.cca_layers": ()}
    for name, changes in {"baseline": {"retrieval.cca_layers": ()}, "copy": copying}.items():
        own = replace(config, run=out / "seed-0" / f"run-{name}", model=updated(config.model, changes))
        file = out / f"{name}.toml"
        file.write_text(to_toml(own))
        assert main(["train", str(file), "--train.steps", "4", "--train.checkpoint-every", "2"]) == 0
    shutil.copytree(out / "seed-0" / "run-copy", out / "seed-0" / "run-both")
    shutil.rmtree(out / "seed-0" / "run-both" / "checkpoints" / "00000004")
    return out


def test_scores_give_the_figures_of_a_direct_comparison_and_are_reused(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    score_runs(experiment, Budget(math.inf), 0)
    runs, direct = experiment / "seed-0", tmp_path / "direct.json"
    assert sorted(file.name for file in runs.glob("score-*")) == ["score-baseline.npz", "score-copy.npz"]
    arguments = ["--against", str(runs / "run-baseline"), "--k", "1", "2", "4", "8", "16", "--output", str(direct)]
    assert main(["eval", "perplexity", str(runs / "run-copy"), *arguments]) == 0
    expected, scores = json.loads(direct.read_text()), load(runs / "score-copy.npz")
    ours = [row for row in expected["results"] if row["model"] == "run-copy"]
    assert [scores.results[row["k"]].bits_per_byte for row in ours] == pytest.approx(
        [row["bits_per_byte"] for row in ours]
    )
    for level in expected["leakage"]:
        tokens = level["shared_tokens_at_most"]
        assert scores.share(tokens) == pytest.approx(level["share_of_chunks"])
        for row in (row for row in level["results"] if row["model"] == "run-copy"):
            part = scores.at_most(row["k"], tokens)
            assert part is not None
            assert part.bits_per_byte == pytest.approx(row["bits_per_byte"])
    capsys.readouterr()
    summarize(experiment, ORDER)
    printed = capsys.readouterr().out
    pair = ("run-copy ON k=8", "run-baseline OFF")
    (change,) = (row for row in expected["changes"] if (row["measured"], row["reference"]) == pair)
    assert f"| copy | ON, k = 8 | {change['percent']:+.1f}%" in printed
    assert "copy OFF" in (experiment / "summary.html").read_text()
    monkeypatch.setattr(retrieval_scores, "score", pytest.fail)
    score_runs(experiment, Budget(math.inf), 0)  # everything is scored


def test_a_larger_datastore_adds_the_text_that_was_not_trained_on(
    tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--output", str(tmp_path), "--chunk-length", "8", "--vocab-size", "320", "--embedders", "lexical"]
    small = ["--larger", "--corpus-mb", "0.005", "--minutes", "0"]
    monkeypatch.setattr("sys.argv", ["retrieval_gain", "build", str(tiny_corpus), *arguments, *small])
    retrieval_gain.main()
    lexical, rest, larger = (Datastore.open(tmp_path / name) for name in ("lexical", "rest", "larger"))
    assert document_ids(lexical) == document_ids(larger)
    assert sorted(document_ids(lexical) + document_ids(rest)) == sorted(
        json.loads(line)["id"] for line in tiny_corpus.read_text().split("\n") if line
    )
    assert (larger.valid.neighbor_ids.read(0, larger.valid.num_chunks) >> CHUNK_ID_BITS == 1).any()


def document_ids(datastore: Datastore) -> list[str]:
    """Ids of the documents of all splits."""
    tables = [table for split in ("train", "valid") for _, table in datastore.split(split).documents.scan(["id"])]
    return [each for table in tables for each in table.column("id").to_pylist()]


# Two documents of two chunks of eight tokens; the first chunk of each shares two tokens with a neighbor, the other all.
CHUNKS = ChunkScores(
    np.arange(4), np.array([0, 0, 1, 1]), np.zeros(4), np.full(4, 8, np.int32), np.full(4, 10, np.int32)
)
LEAKAGE = np.array([0.25, 1.0, 0.25, 1.0])


def scored(bits: dict[int, list[float]]) -> Scores:
    """Scores with these bits of the four chunks by k."""
    results = {}
    for k, values in bits.items():
        nats = np.array(values) * math.log(2)
        sums = np.bincount(CHUNKS.documents, nats)
        results[k] = SetResult("valid", k, 32, 0.0, sums, np.full(2, 20.0), replace(CHUNKS, nats=nats))
    return Scores(results, LEAKAGE, 8)


@pytest.fixture
def two_seeds(tmp_path: Path) -> Path:
    """`copy` saves a tenth of `context`'s bits with seed 0 and three tenths with seed 1, all in the chunks that are repeated."""
    for seed, saved in ((0, 4.0), (1, 12.0)):
        folder = tmp_path / f"seed-{seed}"
        folder.mkdir()
        save(folder / "score-context.npz", scored({0: [10, 10, 10, 10]}), "mark")
        saving = [10, 10 - saved / 2, 10, 10 - saved / 2]
        save(folder / "score-copy.npz", scored({0: [10, 10, 10, 10], 2: saving}), "mark")
    return tmp_path


def test_changes_are_against_the_same_seed_with_mean_and_range(two_seeds: Path) -> None:
    scores = load_all(two_seeds, ORDER)
    assert bits_table(scores).rows[1] == ["copy", "2", "1.0000 (1.0000 to 1.0000)", "0.8000 (0.7000 to 0.9000)"]
    table = changes_table(scores, "context")
    assert table.header == ["model", "", "seed 0", "seed 1", "mean"]
    assert table.rows[1][:2] == ["copy", "ON, k = 2"]
    assert table.rows[1][2:] == ["-10.0% (-10.0 to -10.0)", "-30.0% (-30.0 to -30.0)", "-20.0% (-30.0 to -10.0)"]
    (two_seeds / "seed-1" / "score-context.npz").unlink()
    assert changes_table(load_all(two_seeds, ORDER), "context").rows[1][3:] == ["", "-10.0%"]


def test_changes_by_shared_tokens_count_only_chunks_below_the_level(two_seeds: Path) -> None:
    table = leakage_table(load_all(two_seeds, ORDER), "context")
    assert table.header[2:] == ["4 tokens (α = 0.5, 50.0% of chunks)", "8 tokens (α = 1, 100.0% of chunks)"]
    assert table.rows[0] == ["context", "OFF: bits per byte", "1.0000", "1.0000"]
    assert [cell.split(" ")[0] for cell in table.rows[2][2:]] == ["+0.0%", "-20.0%"]


def test_a_reference_that_retrieves_is_compared_with_the_same_number_of_neighbors(two_seeds: Path) -> None:
    for seed in (0, 1):
        save(two_seeds / f"seed-{seed}" / "score-both.npz", scored({0: [9, 9, 9, 9], 2: [10, 5, 10, 5]}), "mark")
    scores = load_all(two_seeds, (*ORDER, "both"))
    rows = {(row[0], row[1]): row[2:] for row in changes_table(scores, "copy").rows}
    assert rows["both", "OFF"][0].startswith("-10.0%")
    assert rows["both", "ON, k = 2"][0].startswith("-16.7%")  # 30 bits against 36
    rows = {(row[0], row[1]): row[2:] for row in leakage_table(scores, "copy").rows}
    assert rows["copy", "ON, k = 2: bits per byte"] == ["1.0000", "0.8000"]
    assert [cell.split(" ")[0] for cell in rows["both", "ON, k = 2"]] == ["+0.0%", "-6.2%"]


def test_scores_of_different_chunks_are_refused(two_seeds: Path) -> None:
    other = scored({0: [10, 10, 10, 10]})
    fewer = replace(
        other.results[0], bytes_by_document=np.array([20.0, 0.0]), chunks=replace(CHUNKS, bytes=CHUNKS.bytes - 1)
    )
    save(two_seeds / "seed-0" / "score-baseline.npz", replace(other, results={0: fewer}), "mark")
    with pytest.raises(InputError, match="not scored on the same chunks"):
        load_all(two_seeds, ORDER)
    with pytest.raises(InputError, match="The part `score` writes them"):
        load_all(two_seeds / "seed-1" / "nothing", ORDER)
