"""The page of `retro eval perplexity`: blue is retrieval ON, orange is OFF; an interval that does not exist is not shown."""

import re

from pipelines.evaluation.bits_per_byte_page import _plots_by_leakage
from pipelines.evaluation.bits_per_byte_tables import interval_in_words


def test_of_one_model_retrieval_off_is_orange_and_the_smallest_k_blue() -> None:
    rows = [{"set": "valid", "model": "", "k": k, "bits_per_byte": 2.0 - k / 10} for k in (0, 2, 4)]
    levels = [{"set": "valid", "shared_tokens_at_most": shared, "results": rows} for shared in (8, 64)]
    (svg,) = _plots_by_leakage(levels, ["valid"])
    lines = re.findall(r'style="fill: none; (stroke-dasharray[^"]*?)?;? ?stroke: ([^;"]+)', svg)
    of_lines = {color: bool(dashes) for dashes, color in lines if "ink" in color or "#" in color}
    assert of_lines["var(--hurt-ink, #b03a05)"]
    assert not of_lines["var(--helped-ink, #1d4ed8)"]
    assert not of_lines["#10b981"]


def test_equal_ends_are_no_interval() -> None:
    assert interval_in_words(-13.2, -13.2) == "no interval"
    assert interval_in_words(-13.2, -1.0) == "-13.20% to -1.00%"
