"""Reports: whole, self-contained, safe, the same for the same data."""

import numpy as np

from pipelines.report import NeighborExample, NeighborText, Section, Table, histogram, line_plot, marked, write_report


def test_a_report_holds_its_parts_and_escapes_text(tmp_path) -> None:
    example = NeighborExample("x <script> 你好", " after", [NeighborText(0.5, "doc<1>", "text", "more")])
    sections = [
        Section(
            "First",
            "A & B",
            Table(["a", "b"], [["row", "1"]]),
            [line_plot({"s": ([1, 2], [3, 4])}, "x", "y", "t")],
            [example],
        )
    ]
    write_report(tmp_path / "r.html", title="T", subtitle="S", sections=sections, figures=[("label", "0.5", "note")])
    html = (tmp_path / "r.html").read_text()
    for part in ("First", "A &amp; B", "<td>row</td>", "<svg", "x &lt;script&gt; 你好", "doc&lt;1&gt;", "label"):
        assert part in html
    assert "<script" not in html
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_plots_are_the_same_for_the_same_data() -> None:
    draw = lambda: histogram({"a": np.arange(10), "b": np.arange(5)}, "x", "t")  # noqa: E731
    assert draw() == draw()


def test_plots_of_nothing_are_empty_and_not_an_error() -> None:
    assert "<svg" in line_plot({}, "x", "y", "t", log_x=True)
    assert "<svg" in histogram({}, "x", "t")


def test_shared_runs_of_three_words_are_marked() -> None:
    assert marked("a big red house here", "the big red house") == "a <mark>big red house</mark> here".replace(
        "a <mark>", "a<mark> "
    )
    assert "<mark>" not in marked("one two", "one two")
    assert "<mark>检索增强</mark>" in marked("用检索增强", "检索增强吗")
