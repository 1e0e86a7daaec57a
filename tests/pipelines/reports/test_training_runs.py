"""The page of a training run is complete for every kind of run and equals the logged metrics."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from indexing.store.errors import InputError
from pipelines.reports.training_runs import (
    gain_curve,
    groups_table,
    held_out_table,
    largest_of,
    more_metrics,
    open_run,
    smoothed,
    spikes,
    thinned,
    write_run_report,
)
from retro.training.run_folder import read_metrics
from retro.training.settings import TrainSettings


def write_run(folder: Path, steps: int = 20, *, sets=("valid",), modes=("off", "on"), **settings) -> Path:
    """Write the folder of a run of 20 steps that has reached `steps`, with an evaluation every fifth step."""
    folder.mkdir(parents=True)
    train = {"steps": 20, "lr": 1e-3, "report_to": []} | settings
    (folder / "settings.json").write_text(json.dumps({"train": train, "data": {"k": 2}}))
    lines: list[dict[str, float]] = []
    for step in range(1, steps + 1):
        position = {"step": step, "tokens": 100 * step}
        rates = {"gradient_norm": 1.0, "tokens_per_second": 1000 + step, "mfu": 0.25, "memory_bytes": 5e9}
        lines.append(position | {"loss": 5 - step / 10, "lr": 1e-3} | rates)
        if step % 5 == 0:
            values = {"off": 2 - step / 100, "on": (2 - step / 100) * 0.9}
            lines.append(position | {f"{name}_bits_per_byte_{mode}": values[mode] for name in sets for mode in modes})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_loss_of_held_out_examples_is_shown_like_bits_per_byte(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "finetuned")
    lines = (folder / "metrics.jsonl").read_text().replace("valid_bits_per_byte", "held_out_loss")
    (folder / "metrics.jsonl").write_text(lines)
    html = page_of(folder)
    assert {"Held out: held_out", "Held out: held_out, retrieval ON against OFF"} <= set(titles(html))
    for words in ("held_out, nats per token of answers, ON", "-10.00%", "1.6200"):
        assert words in html, words


def page_of(*folders: Path) -> str:
    path = folders[0] / "page.html"
    write_run_report(folders, path)
    return path.read_text()


def titles(html: str) -> list[str]:
    return re.findall(r'aria-label="([^"]+)"', html)


def test_page_shows_figures_curves_and_settings_of_a_run(tmp_path: Path) -> None:
    html = page_of(write_run(tmp_path / "retro", sets=("valid", "web")))
    assert "Finished after 20 steps" in html
    for figure in ("2,000 tokens", "1.6200", "best 1.6200 after 2,000 tokens", "1.8000", "-10.00%", "1,010", "25.0%"):
        assert figure in html, figure
    assert titles(html) == [
        "Held out: valid",
        "Held out: valid, retrieval ON against OFF",
        "Held out: web",
        "Held out: web, retrieval ON against OFF",
        "Training loss",
        "Learning rate",
        "Norm of the gradient, before clipping",
        "Speed",
        "mfu",
        "memory_bytes",
    ]
    assert "<td>train.report_to</td>" in html
    assert "<script" not in html
    assert set(re.findall(r"https?://[^\"\s]+", html)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_unfinished_run_is_shown_up_to_its_last_complete_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "retro", steps=7)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "tok')
    assert "Step 7 of 20: running or stopped" in page_of(folder)
    assert len(read_metrics(folder)) == 8


def test_runs_without_evaluations_or_without_metrics_have_a_page(tmp_path: Path) -> None:
    html = page_of(write_run(tmp_path / "short", steps=3))
    assert "Held" not in html
    assert "Training loss" in titles(html)
    html = page_of(write_run(tmp_path / "empty", steps=0))
    assert titles(html) == []
    assert "Changed settings" in html


def test_baseline_has_no_figure_for_the_gain_of_retrieval(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "baseline", modes=("off",))
    html = page_of(folder)
    assert titles(html)[0] == "Held out: valid"
    assert not any("against" in title for title in titles(html))
    assert held_out_table([open_run(folder, "baseline")]).rows == [
        ["baseline", "valid", "1.8000", "–", "–", "1.8000", "–"]
    ]


def test_page_of_several_runs_shows_their_names_and_differing_settings(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a" / "run")
    second = write_run(tmp_path / "b" / "run", lr=5e-4, modes=("off",))
    html = page_of(first, second)
    assert "<h1>a, b</h1>" in html
    differ, common = html.index("Settings that differ"), html.index("Settings in common")
    assert differ < html.index("<td>train.lr</td>") < common < html.index("<td>data.k</td>")
    for label in ("a ON", "a OFF", "b OFF"):
        assert f"<!-- {label} -->" in html or f">{label}<" in html
    assert "b ON" not in html


def test_changed_settings_come_first_with_their_defaults(tmp_path: Path) -> None:
    html = page_of(write_run(tmp_path / "retro", lr=5e-4, seed=TrainSettings().seed))
    changed, default = html.index("Changed settings"), html.index("Default settings")
    assert changed < html.index("<td>train.lr</td>") < html.index("<svg")
    assert html.index("<svg") < default < html.index("<td>train.seed</td>")
    assert re.search(rf"<td>train.lr</td>\s*<td[^>]*>0.0005</td>\s*<td[^>]*>{TrainSettings().lr}</td>", html)


def test_gain_of_retrieval_compares_on_with_off_at_the_same_tokens(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "retro"), "retro")
    tokens, percent = gain_curve(run, "valid")
    assert tokens.tolist() == [500, 1000, 1500, 2000]
    assert percent == pytest.approx([-10] * 4)


def test_metrics_that_are_not_finite_numbers_are_omitted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "retro")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 21, "tokens": 2100, "loss": NaN, "lr": Infinity, "note": "text"}\n')
    run = open_run(folder, "retro")
    assert len(run.curve("loss")[0]) == len(run.curve("lr")[0]) == 20
    assert more_metrics([run]) == ["mfu", "memory_bytes"]
    page_of(folder)


def test_long_curves_are_thinned_and_keep_their_spikes() -> None:
    tokens, values = np.arange(10_001.0), np.sin(np.arange(10_001.0))
    values[5_000] = 9
    for thin in (thinned, spikes):
        kept, _ = thin(tokens, values)
        assert len(kept) <= 800
        assert (np.diff(kept) > 0).all()
    assert thinned(tokens, values)[0][[0, -1]].tolist() == [0, 10_000]
    assert spikes(tokens, values)[1].max() == 9
    for size in (0, 1, 2, 400, 401):
        assert len(thinned(tokens[:size], values[:size])[0]) == min(size, 400)


def test_smoothing_keeps_constants_and_the_length() -> None:
    assert smoothed(np.full(500, 3.0)) == pytest.approx(np.full(500, 3.0))
    assert smoothed(np.array([1.0, 2.0])).tolist() == [1, 2]
    noise = np.random.default_rng(0).normal(size=5000)
    assert smoothed(noise).std() < 0.2 * noise.std()


def test_folder_without_a_run_and_run_named_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not the folder of a run.*settings\.json.*retro train"):
        write_run_report([tmp_path], tmp_path / "page.html")
    folder = write_run(tmp_path / "retro")
    with pytest.raises(InputError, match="named twice"):
        write_run_report([folder, folder], tmp_path / "page.html")
    (folder / "metrics.jsonl").write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl:2: not JSON"):
        write_run_report([folder], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_layer_groups_have_a_table_and_one_line_per_kind(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "retro")
    with open(folder / "metrics.jsonl", "a") as file:
        for step in (1, 2):
            line: dict[str, float] = {"step": step, "tokens": 100 * step}
            for number, group in enumerate(("attention_01", "attention_02", "embedding"), start=1):
                shares = {"underflow": 0.25 * (number == 3), "overflow": 0.0, "zero": 0.0}
                for name, value in {"gradient_norm": number * step, "update_ratio": 0.5 / step, **shares}.items():
                    line[f"monitor/{name}/{group}"] = value
            file.write(json.dumps(line) + "\n")
    run = open_run(folder, "retro")
    assert groups_table([run]).rows == [
        ["retro", "embedding", "6", "6", "0.25", "0.5", "0.25", "0"],
        ["retro", "attention_01", "2", "2", "0.25", "0.5", "0", "0"],
        ["retro", "attention_02", "4", "4", "0.25", "0.5", "0", "0"],
    ]
    tokens, values = largest_of(run, "gradient_norm", "attention")
    assert (tokens.tolist(), values.tolist()) == ([100, 200], [2, 4])
    html = page_of(folder)
    assert [title for title in titles(html) if title.endswith("by layer group")] == [
        "Norm of the gradient, by layer group",
        "Update over weights, by layer group",
        "Underflow, by layer group",  # no overflow was logged
    ]
    assert not any(title.startswith("monitor/") for title in titles(html))
