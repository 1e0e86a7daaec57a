"""The curves of a run are complete for every kind of run and equal the logged metrics."""

import json
import re
from pathlib import Path

import pytest

from indexing.store.errors import InputError
from pipelines.cli.reports.training_runs import open_run, plot_runs


def write_run(folder: Path, steps: int = 20, *, sets=("valid",), modes=("off", "on")) -> Path:
    """Write the folder of a run of 20 steps that has reached `steps`, with an evaluation every fifth step."""
    folder.mkdir(parents=True)
    sections = {"model": {}, "train": {"steps": 20}, "data": {"datastores": [], "sequence_length": 64}}
    (folder / "settings.json").write_text(json.dumps(sections))
    lines: list[dict[str, float]] = []
    for step in range(1, steps + 1):
        position = {"step": step, "tokens": 100 * step}
        lines.append(position | {"loss": 5 - step / 10, "lr": 1e-3, "tokens_per_second": 1000 + step})
        if step % 5 == 0:
            values = {"off": 2 - step / 100, "on": (2 - step / 100) * 0.9}
            lines.append(position | {f"{name}_bits_per_byte_{mode}": values[mode] for name in sets for mode in modes})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def drawn(svg: str) -> list[str]:
    """Titles of plots and names of lines."""
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", svg)
    return sorted(text for text in texts if re.fullmatch(r"Training loss|Held out: \w+|.*\b(ON|OFF)", text))


def test_the_loss_and_every_set_have_a_plot_and_a_figure(tmp_path: Path) -> None:
    path = tmp_path / "curves.svg"
    table = plot_runs([write_run(tmp_path / "retro", sets=("valid", "web"))], path)
    titles = ["Held out: valid", "Held out: web", "Training loss"]
    assert drawn(path.read_text()) == [*titles, *["retrieval OFF"] * 2, *["retrieval ON"] * 2]
    assert table.rows[0][:4] == ["retro", "20 of 20", "2,000", "1,010"]
    assert table.rows[0][5:] == ["1.8000", "1.6200"] * 2


def test_several_runs_share_the_plots_under_unique_names(tmp_path: Path) -> None:
    path = tmp_path / "curves.svg"
    runs = [write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", modes=("off",))]
    table = plot_runs(runs, path)
    assert drawn(path.read_text()) == ["Held out: valid", "Training loss", "a OFF", "a ON", "b OFF"]
    assert table.rows[1][-2:] == ["1.8000", "–"]


def test_runs_without_evaluations_or_without_metrics_are_plotted(tmp_path: Path) -> None:
    for steps in (3, 0):
        plot_runs([write_run(tmp_path / str(steps), steps=steps)], tmp_path / "curves.svg")
        assert drawn((tmp_path / "curves.svg").read_text()) == ["Training loss"]


def test_the_loss_of_held_out_examples_is_plotted_like_bits_per_byte(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "finetuned")
    lines = (folder / "metrics.jsonl").read_text().replace("valid_bits_per_byte", "held_out_loss")
    (folder / "metrics.jsonl").write_text(lines)
    assert plot_runs([folder], tmp_path / "curves.svg").rows[0][-2:] == ["1.8000", "1.6200"]
    assert "nats per token of answers" in (tmp_path / "curves.svg").read_text()


def test_incomplete_lines_and_values_that_are_not_finite_numbers_are_omitted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "retro", steps=7)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "tokens": 800, "loss": NaN, "lr": Infinity, "note": "text"}\n{"step": 9, "tok')
    run = open_run(folder, "retro")
    assert len(run.curve("loss")[0]) == len(run.curve("lr")[0]) == 7
    assert plot_runs([folder], tmp_path / "curves.svg").rows[0][1] == "8 of 20"


def test_folder_without_a_run_run_named_twice_and_damaged_metrics_are_refused(tmp_path: Path) -> None:
    folder, path = write_run(tmp_path / "retro"), tmp_path / "curves.svg"
    with pytest.raises(InputError, match=r"settings\.json.*retro train"):
        plot_runs([tmp_path], path)
    with pytest.raises(InputError, match="twice"):
        plot_runs([folder, folder], path)
    (folder / "metrics.jsonl").write_text('{"step": 1, "tokens": 64}\nnot json\n{"step": 2, "tokens": 128}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl:2"):
        plot_runs([folder], path)
    assert not path.exists()
