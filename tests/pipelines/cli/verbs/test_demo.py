"""`retro demo`: its models train for the same steps, as many as fit; a stopped demo resumes; a passage shows what was copied."""

import base64
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_json
from indexing.store.retrieval_set import RetrievalSet
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.cli.main import main
from pipelines.cli.reports.html import Section, write_report
from pipelines.cli.verbs import demo_training
from pipelines.cli.verbs.comparison import Comparison, difference
from pipelines.cli.verbs.demo import DemoOptions
from pipelines.cli.verbs.demo_training import compared, demo, runs_of, train_models
from pipelines.cli.verbs.evaluation_tables import gain_in_words
from pipelines.config import Config
from retro.copying.head import CopyHead
from retro.evaluation.bits_per_byte import SetResult
from retro.evaluation.passages import ColoredPassage, CopiedFrom, CopiedRun, Piece, colored, copied_runs
from retro.evaluation.settings import LEAST_DOCUMENTS
from retro.evaluation.token_gains import Passage
from retro.model.presets import count_parameters
from retro.model.retro import Retro
from retro.model_settings import ModelSettings, updated
from retro.training.trainer import Outcome
from tests.conftest import tiny_config, write_corpus


@dataclass
class Machine:
    """Training of 100 tokens a step that takes time but computes nothing.

    Attributes:
        seconds: of a step of one model, by the number of steps done before it.
        now: the clock.
        runs: name and last step of every run.
    """

    seconds: Callable[[int], float]
    now: float = 0.0
    runs: list[tuple[str, int]] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)
    stop_at: int = 10**9

    def train(self, config: Config, *_: Any) -> Outcome:
        name, steps = config.run.name, config.train.steps
        before = self.done.get(name, 0)
        for step in range(before, steps):
            self.now += self.seconds(step)
            self.done[name] = step + 1
            if len(self.runs) * 1000 + step >= self.stop_at:
                raise KeyboardInterrupt
        self.runs.append((name, steps))
        line = {"step": steps, "tokens": 100 * steps, "tokens_per_second": 100 / self.seconds(steps - 1)}
        return Outcome(config.run, [line], 0)


@pytest.fixture
def small(tmp_path: Path, tiny_corpus: Path) -> Config:
    config = tiny_config(tmp_path, tiny_corpus)
    write_json(tmp_path / "demo.json", {"seed": 0})
    heads = updated(config.model, {"copy_head.context": True, "copy_head.neighbors": True})
    return replace(config, model=heads, train=replace(config.train, warmup_steps=3))


def trained_on(machine: Machine, config: Config, until: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """The last step of a training on a machine."""
    monkeypatch.setattr(demo_training, "run_training", machine.train)
    monkeypatch.setattr(demo_training.time, "monotonic", lambda: machine.now)
    return train_models(config, config.run.parent, until).config.train.steps


def test_steps_fill_the_time_and_are_the_same_for_all_models(small: Config, monkeypatch) -> None:
    machine = Machine(lambda _: 0.5)
    steps = trained_on(machine, small, 600, monkeypatch)
    assert [name for name, _ in machine.runs[:3]] == ["plain", "baseline", "retro"]
    ends = [{steps for _, steps in machine.runs[first : first + 3]} for first in range(0, len(machine.runs), 3)]
    assert [len(each) for each in ends] == [1] * len(ends)
    assert ends[-1] == {steps}
    assert 500 < machine.now <= 600


@pytest.mark.parametrize("first", [5.0, 0.1], ids=["slow", "fast"])
def test_a_trial_at_another_speed_changes_little(small: Config, monkeypatch, first: float) -> None:
    machine = Machine(lambda step: first if step < 3 else 0.5)
    steps = trained_on(machine, small, 600, monkeypatch)
    assert machine.now <= 600
    assert steps > 250


def test_a_machine_that_becomes_slower_trains_fewer_steps(small: Config, monkeypatch) -> None:
    machine = Machine(lambda step: 0.5 if step < 120 else 1.0)
    assert trained_on(machine, small, 600, monkeypatch) < 300
    assert machine.now <= 600


@pytest.mark.parametrize("until", [1.0, -1.0], ids=["little time", "too late"])
def test_training_has_a_few_steps_without_any_time_left(small: Config, monkeypatch, until: float) -> None:
    assert trained_on(Machine(lambda _: 100.0), small, until, monkeypatch) == 5


def test_a_stopped_training_resumes_with_the_stored_round(small: Config, monkeypatch) -> None:
    machine = Machine(lambda _: 0.5, stop_at=4010)  # the second model in the second round
    with pytest.raises(KeyboardInterrupt):
        trained_on(machine, small, 600, monkeypatch)
    stored = read_json(small.run.parent / "demo.json")
    assert stored["seed"] == 0
    machine.stop_at = 10**9
    steps = trained_on(machine, small, machine.now + 100, monkeypatch)
    assert [end for _, end in machine.runs[3:7]] == [stored["round"]["steps"]] * 4
    assert machine.done == dict.fromkeys(runs_of(small), steps)
    before = list(machine.runs)
    assert trained_on(machine, small, machine.now + 100, monkeypatch) == steps  # a finished demo trains no more
    assert machine.runs == [*before, *((name, steps) for name in runs_of(small))]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ((-11.2, -26.2, -5.1), "needs 11.2% fewer bits per byte than a plain baseline (95%"),
        ((3.0, 1.0, 5.0), "needs 3.0% more bits per byte than a plain baseline (95%"),
        ((-0.1, -0.6, 0.2), "needs about as many bits per byte as a plain baseline (-0.1%; 95%"),
    ],
)
def test_a_difference_that_may_be_chance_is_not_called_a_gain(change: tuple[float, float, float], said: str) -> None:
    assert said in difference("RETRO", "a plain baseline", change, 20)


@pytest.mark.parametrize("documents", [1, 2, LEAST_DOCUMENTS - 1, LEAST_DOCUMENTS])
def test_few_documents_give_no_percentage_in_any_verdict(documents: int) -> None:
    change = (-28.5, -40.0, -10.0)
    said = difference("RETRO", "without it", change, documents)
    rows = [
        {"model": "", "bits_per_byte": bits, "documents": documents, "set": "valid", "k": 2, "votes": False}
        for bits in (2.0, 1.4)
    ]
    changes = [dict(zip(("percent", "low", "high"), change, strict=True))]
    verdict = gain_in_words(rows, changes, ModelSettings())
    if documents < LEAST_DOCUMENTS:
        assert "%" not in said
        assert "Too few held-out documents" in verdict
        assert f"{LEAST_DOCUMENTS} or more" in said
        assert f"{LEAST_DOCUMENTS} or more" in verdict
    else:
        assert "28.5% fewer" in said
        assert "saves 28.5%" in verdict


def measured(*nats: float, k: int = 0, votes: bool = False) -> SetResult:
    """A measurement of documents of 1,000 bytes."""
    size = len(nats)
    return SetResult("valid", k, 250 * size, 1.0, 1000 * np.array(nats), np.full(size, 1000.0), votes)


def compared_on(documents: int) -> Comparison:
    plain, copying, off, near, on = (
        measured(*(part * np.linspace(1, 2, documents)), k=k, votes=votes)
        for part, k, votes in ((2, 0, False), (1.5, 0, False), (1.6, 0, False), (1.2, 4, False), (1, 4, True))
    )
    return compared(plain, copying, [off, near, measured(*off.nats_by_document, votes=True), on])


def test_rows_with_retrieval_are_blue_and_all_others_are_compared_with_the_last() -> None:
    rows = compared_on(20)
    assert [bar.is_blue for bar in rows.bars] == [False, False, False, True, True]
    assert [row[2].split()[0] for row in rows.table.rows if row[2]] == ["-50.0%", "-33.3%", "-37.5%", "-16.7%"]
    assert rows.table.rows[-1][1:] == [f"{rows.bars[-1].value:.4f}", ""]
    assert "33.3% fewer bits per byte" in rows.verdict


def test_a_single_document_has_no_interval(capsys) -> None:
    one = compared_on(1)
    assert "score 5 or more" in one.verdict
    assert [bar.interval for bar in one.bars] == [None] * 5
    one.print_rows()
    shown = capsys.readouterr().out
    assert "95% interval" not in shown
    assert " to " not in shown.partition("\n\n")[0]
    assert "no interval" in one.chart.light


def test_the_models_have_the_same_number_of_parameters(small: Config) -> None:
    models = {name: updated(run.model, {"vocab_size": 300, "chunk_length": 16}) for name, run in runs_of(small).items()}
    sizes = {name: count_parameters(Retro(model)) for name, model in models.items()}
    sizes["plain"] += count_parameters(CopyHead(models["baseline"].copy_head.names, 1))  # 696 parameters
    assert max(sizes.values()) < 1.01 * min(sizes.values())
    heads = {name: (model.copy_head.context, model.copy_head.neighbors) for name, model in models.items()}
    assert heads == {"plain": (False, False), "baseline": (True, False), "retro": (True, True)}
    assert not models["baseline"].retrieves


# --- passages ------------------------------------------------------------------------------------------------------


def passage(tokens: list[int], copied: list[float], places: list[tuple[int, int]], datastore: Datastore) -> Passage:
    """A passage whose tokens were copied from (neighbor, position)."""
    read, count = datastore.train.with_continuation(np.array([0, 1])), len(tokens)
    return Passage(
        chunk=1,
        before=np.array(tokens),
        tokens=np.array(tokens),
        off=np.full(count, -3.0),
        on=np.linspace(-6, 0, count),
        copied=np.array(copied, dtype=np.float32),
        neighbors=np.array([neighbor for neighbor, _ in places]),
        positions=np.array([position for _, position in places]),
        from_datastore=np.zeros(count, dtype=np.float32),
        neighbor_ids=np.array([0, 1]),
        neighbor_tokens=[tokens[:length] for tokens, length in zip(*read, strict=True)],
    )


def test_a_run_is_copied_from_successive_tokens_of_one_neighbor(tiny_datastore: Datastore) -> None:
    places = [(0, 3), (0, 4), (1, 5), (0, 6), (0, 7), (0, 9), (0, 10), (-1, -1)]
    copied = [0.9, 0.5, 0.9, 0.6, 0.7, 0.8, 0.4, 0.0]
    runs = copied_runs(passage([5] * 8, copied, places, tiny_datastore))
    assert runs == [CopiedRun(0, 2, 0, 3), CopiedRun(3, 5, 0, 6)]


def test_a_colored_passage_has_all_characters_and_marks_what_was_copied(tiny_datastore: Datastore) -> None:
    tokenizer = Tokenizer.open(tiny_datastore.folder / "tokenizer")
    text = tiny_datastore.train.tokens.read(0, 1)[0].astype(np.int64)[:8]
    places = [(0, n) if 2 <= n < 6 else (-1, -1) for n in range(8)]
    copied = [float(neighbor == 0) for neighbor, _ in places]
    original = passage(text.tolist(), copied, places, tiny_datastore)
    view = colored(original, "title", tokenizer, RetrievalSet.of(tiny_datastore))
    assert "".join(piece.text for piece in view.pieces) == tokenizer.decode(text)
    assert sum(piece.gain for piece in view.pieces) == pytest.approx(original.gains.sum())
    assert [piece.source for piece in view.pieces if piece.source] == [1]
    assert not any(piece.text[-1:].isspace() for piece in view.pieces if piece.source)
    for neighbor, tokens in zip(view.sources, original.neighbor_tokens, strict=True):
        assert "".join(part for part, _ in neighbor.parts) == tokenizer.decode(tokens)
    marked = "".join(part for part, is_copied in view.sources[0].parts if is_copied)
    assert marked.strip()
    assert marked.strip() in tokenizer.decode(text)
    assert not any(is_copied for _, is_copied in view.sources[1].parts)


VIEW = ColoredPassage(
    "title",
    "before",
    [Piece("same "), Piece("copied\n<b>", 2.5, source=1), Piece(" lost", -0.6)],
    [CopiedFrom(1, "doc.py", [("x" * 100, False), ("copied\n<b>", True), (" y", False)])],
)


def test_a_report_has_the_colors_their_legend_and_the_neighbors(tmp_path: Path) -> None:
    write_report(tmp_path / "r.html", title="T", subtitle="", sections=[Section("A", passages=[VIEW])])
    html = (tmp_path / "r.html").read_text()
    assert '<span class="up2" title="+2.50 bits">copied\n&lt;b&gt;</span><sup>1</sup>' in html
    assert '<span class="down1" title="-0.60 bits"> lost</span>' in html
    assert "<mark>copied</mark>\n<mark>&lt;b&gt;</mark>" in html
    assert "log2 p with retrieval" in html


# --- the whole demo ------------------------------------------------------------------------------------------------


def test_another_corpus_needs_another_folder(tmp_path: Path) -> None:
    write_json(tmp_path / "demo.json", {"corpus": ["a"], "seed": 0})
    with pytest.raises(InputError, match="another model, corpus or seed"):
        demo(DemoOptions(corpus=("b",), output=tmp_path))


@pytest.mark.slow
def test_the_demo_says_first_what_was_gained_and_a_rerun_says_the_same(tmp_path: Path, capsys) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", 200, seed=4)  # 7 documents are held out
    arguments = ["demo", "--corpus", str(corpus), "--minutes", "0.05", "--output", str(tmp_path / "demo")]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    result = out[out.index("\n3. ") :]
    written = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert result.startswith(f"\n3. {written['verdict']}\n")
    assert re.match(r"With retrieval, RETRO needs .* bits per byte .*interval", written["verdict"])
    assert "{+" in result[result.index("\n4. ") :]
    html, picture = ((tmp_path / "demo" / name).read_text() for name in ("report.html", "bits_per_byte.svg"))
    assert html.count(base64.b64encode(picture.encode()).decode()) == 1
    assert html.count(escape(written["verdict"])) == 1
    numbers = {name: len(rows) for name, rows in written["results"].items()}
    assert numbers == {"plain baseline": 1, "copying baseline": 1, "RETRO": 4}
    assert main(arguments) == 0
    assert without_times(capsys.readouterr().out) == without_times(out)


def without_times(text: str) -> list[Any]:
    return [line for line in text.splitlines() if "to step" not in line]
