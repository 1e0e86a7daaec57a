"""The sentence that ends `retro eval perplexity`: saved, cost, or not measurable."""

import re

import numpy as np
import pytest

from pipelines.cli.verbs.evaluation_tables import gain_in_words, tables_of
from retro.evaluation.bits_per_byte import SetResult, mode_of
from retro.evaluation.perplexity import Row
from retro.evaluation.perplexity import level as level_of
from retro.model_settings import NO_COPY_HEAD, CopyHeadSettings, ModelSettings

COPYING = ModelSettings(copy_head=CopyHeadSettings(context=True, neighbors=True))
PLAIN = ModelSettings(copy_head=NO_COPY_HEAD)


def level(
    changes: dict[int, float], documents: int, noise: float = 0.0, other: str = ""
) -> tuple[list[Row], list[Row]]:
    """Results and changes. Documents of 1,000 bytes; retrieval with k neighbors changes their nats by a share, with noise."""
    generator, sizes = np.random.default_rng(0), np.full(documents, 1000.0)
    nats = {
        0: sizes,
        **{k: sizes * (1 + change + generator.normal(0, noise, documents)) for k, change in changes.items()},
    }
    measured = [
        SetResult("valid", k, 1000 * documents, 1.0, sums, sizes, model="ours" if other else "")
        for k, sums in nats.items()
    ]
    measured += [SetResult("valid", 0, 1000 * documents, 1.0, sizes * 0.5, sizes, model=other)] if other else []
    found = level_of({}, measured, seed=0)
    return found["results"], found["changes"]


def figures(sentence: str) -> list[str]:
    return re.findall(r"\d+\.\d+", sentence)


@pytest.mark.parametrize("other", ["", "baseline"])
def test_the_best_number_of_neighbors_says_what_is_saved_or_what_it_costs(other: str) -> None:
    saves = gain_in_words(*level({1: -0.01, 4: -0.05}, 20, other=other), COPYING)
    assert saves.startswith("Retrieval saves 5.0%")
    assert "k = 4" in saves
    assert figures(saves) == ["5.0", "5.0", "5.0"]  # the interval of documents that change alike is a point
    costs = gain_in_words(*level({1: 0.02, 4: 0.05}, 20, other=other), COPYING)
    assert costs.startswith("Retrieval costs 2.0%")
    assert "k = 1" in costs


def test_the_interval_is_printed_as_saved_from_the_smaller_to_the_larger_figure() -> None:
    results, (change,) = level({2: -0.05}, 200, noise=0.1)
    assert change["low"] < change["percent"] < change["high"] < 0
    expected = [f"{-change[key]:.1f}" for key in ("percent", "high", "low")]
    assert figures(gain_in_words(results, [change], COPYING)) == expected


@pytest.mark.parametrize("change", [-0.3, 0.3])
def test_an_interval_of_few_documents_is_neither_a_gain_nor_none_and_names_the_settings(change: float) -> None:
    sentence = gain_in_words(*level({2: change}, 4), PLAIN)
    assert not re.match("No measurable gain|Retrieval (saves|costs)", sentence)
    assert "corpus.split" in sentence
    assert "evaluation.max_tokens" in sentence


@pytest.mark.parametrize("measured", [level({2: -0.001}, 30, noise=0.05), level({2: -0.0003}, 30)])
def test_an_interval_with_zero_is_no_measurable_gain_and_names_what_to_try(
    measured: tuple[list[Row], list[Row]],
) -> None:
    sentence = gain_in_words(*measured, PLAIN)
    assert sentence.startswith("No measurable gain yet")
    assert "model.copy_head.neighbors = true" in sentence
    assert "corpus.split" in sentence
    assert "model.copy_head" not in gain_in_words(*measured, COPYING)


def test_without_retrieval_there_is_no_sentence() -> None:
    assert gain_in_words(*level({}, 20), PLAIN) == ""
    assert gain_in_words(*level({}, 20, other="baseline"), PLAIN) == ""


def test_tables_of_many_measurements_have_lines_that_fit_on_a_screen() -> None:
    modes = [(k, votes) for votes in (False, True) for k in (0, 1, 2, 4)]
    figures = {"perplexity": 214.0, "tokens": 1_234_567, "bytes": 7_654_321, "tokens_per_second": 4321.0}
    rows = [
        {"set": "valid", "model": model, "k": k, "votes": votes, "retrieval": "ON" if k or votes else "OFF"}
        | {"bits_per_byte": 3.3 - number / 10}
        | figures
        for model in ("retro", "baseline")
        for number, (k, votes) in enumerate(modes)
    ]
    best, interval = "retro ON k=4 + datastore", {"percent": -95.94, "low": -96.21, "high": -95.58}
    changes = [
        {"set": "valid", "measured": f"{row['model']} {mode_of(row['k'], row['votes'])}", "reference": reference}
        | interval
        for row in rows
        for reference in ("retro OFF", "baseline ON k=4 + datastore")
    ]
    band = {"set": "valid", "of": "token", "match_at_least": 64, "match_at_most": None, "documents": 17}
    level = band | {"tokens": 1_234_567, "results": rows, "changes": changes}
    tables = tables_of(
        {"results": rows, "changes": changes, "matches": [level], "leakage": [], "datastore_fractions": [], "texts": []}
    )
    assert max(len(line) for table in tables.values() for line in table.text.splitlines()) <= 145  # with two models
    of_band = [row[4] for row in tables["By longest match before the token"].rows]
    assert of_band == ["retro OFF", "", best, "", "baseline OFF", "", "baseline ON k=4 + datastore", ""]


def test_a_change_of_a_single_document_has_no_interval() -> None:
    nothing = dict.fromkeys(("results", "matches", "leakage", "datastore_fractions", "texts"), ())
    change = {"set": "valid", "measured": "ON k=2", "reference": "OFF", "percent": -13.2, "low": -13.2, "high": -13.2}
    changes = [change, change | {"high": -1.0}]
    tables = tables_of({**nothing, "changes": changes})
    assert list(tables) == ["Changes"]
    assert [row[-1] for row in tables["Changes"].rows] == ["no interval", "-13.20% to -1.00%"]
