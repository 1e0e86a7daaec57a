"""HTML reports are complete, self-contained, escaped and deterministic."""

import re
from html import unescape
from pathlib import Path

import numpy as np

from pipelines.cli.reports.html import NeighborExample, NeighborText, Section, colored_text, mark, marked, write_report
from pipelines.cli.reports.pictures import THEMES, Bar, Plot, PlotLine, bar_chart, histogram, line_plots
from pipelines.cli.results import Table
from retro.evaluation.passages import ColoredPassage, CopiedFrom, Piece

ROOT = Path(__file__).resolve().parents[4]
PLOT = line_plots(Plot({"s": PlotLine([1, 2], [3, 4])}, "x", "y", "t"))


def test_report_contains_its_parts_and_escapes_text(tmp_path) -> None:
    example = NeighborExample("own.md", "x <script> 你好", " after", [NeighborText(0.5, "doc<1>", "text", "more")])
    sections = [
        Section(
            "First",
            "A & B",
            Table(["a", "b"], [["row", "1"]]),
            [PLOT],
            [example],
        )
    ]
    write_report(tmp_path / "r.html", title="T", subtitle="S", sections=sections, figures=[("label", "0.5", "note")])
    html = (tmp_path / "r.html").read_text()
    for part in (
        "First",
        "A &amp; B",
        "<td>row</td>",
        PLOT.uri("light"),
        PLOT.uri("dark"),
        "x &lt;script&gt; 你好",
        "doc&lt;1&gt;",
        "chunk of own.md",
        "label",
    ):
        assert part in html
    assert "<script" not in html
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_plots_are_the_same_for_the_same_data() -> None:
    draw = lambda: histogram({"a": np.arange(10), "b": np.arange(5)}, "x", "t")  # noqa: E731
    assert draw() == draw()


def test_plots_without_data_are_empty_and_raise_no_error() -> None:
    assert "<svg" in line_plots(Plot({}, "x", "y", "t", log_x=True)).light
    assert "<svg" in histogram({}, "x", "t").light


def test_shared_runs_of_three_words_are_marked_without_surrounding_spaces() -> None:
    assert marked("a big red house here", "the big red house") == "a <mark>big red house</mark> here"
    assert "<mark>" not in marked("one two", "one two")
    assert "<mark>检索增强</mark>" in marked("用检索增强", "检索增强吗")


def test_punctuation_alone_is_not_marked_as_shared() -> None:
    assert "<mark>" not in marked("([{x}])", "([{y}]) ([{")


def test_line_breaks_and_indentation_are_not_marked() -> None:
    marks = mark("one two\n        three")
    assert marks == marked("one two\n        three", "one two\n        three")
    assert re.findall("<mark>(.*?)</mark>", marks, flags=re.DOTALL) == ["one two", "three"]
    assert Piece("\n        ", 3.0).shade == 0


def test_of_the_source_only_what_is_next_to_copied_parts_is_shown() -> None:
    long, copied = "a" * 500 + "b" * 500, "copied words"
    shown = CopiedFrom(1, "d", [(long, False), (copied, True), (long, False), (copied, True), ("end", False)]).shortened
    assert [text for text, is_copied in shown if is_copied] == [copied, copied]
    first, _, middle, _, last = (text for text, _ in shown)
    assert first.startswith("…b")
    assert (middle[0], middle[-1], last) == ("a", "b", "end")
    assert max(map(len, (first, middle))) < 400


def test_sources_without_a_copied_run_are_folded(tmp_path: Path) -> None:
    sources = [
        CopiedFrom(1, "used.py", [("words", True)], is_neighbor=False),
        CopiedFrom(2, "unused.py", [("x", False)]),
    ]
    passage = ColoredPassage("T", "", [Piece("words", 3.0, source=1)], sources)
    write_report(tmp_path / "r.html", title="T", subtitle="", sections=[Section("A", passages=[passage])])
    shown, _, folded = (tmp_path / "r.html").read_text().partition("<details")
    assert "used.py, in the whole datastore" in shown
    assert "unused.py" not in shown
    assert "unused.py" in folded


def test_passages_for_a_notebook_have_their_colors_and_change_nothing_around_them() -> None:
    passage = ColoredPassage("<T>", "", [Piece("likelier", 3.0), Piece("less likely", -3.0)], [])
    html = colored_text([passage]).html
    assert 'class="up2" title="+3.00 bits">likelier</span>' in html
    assert 'class="down2" title="-3.00 bits">less likely</span>' in html
    assert "&lt;T&gt;" in html
    (style,) = re.findall(r"<style>(.*?)</style>", html, flags=re.DOTALL)
    outside = re.sub(r"{(?:[^{}]|{[^{}]*})*}", "", style)  # selectors of the highest level
    assert re.sub(r"\s+", " ", outside).strip() == ".retro-passages @media (prefers-color-scheme: dark)"
    assert not re.findall(r"https?://", html)


def test_marking_escapes_text_and_loses_none() -> None:
    text = "if a < b and c:\n\treturn <x> & 你好"
    html = marked(text, "if a < b and")
    assert unescape(re.sub("</?mark>", "", html)) == text
    assert "<x>" not in html


def test_report_loads_nothing_from_outside(tmp_path) -> None:
    write_report(tmp_path / "r.html", title="T", subtitle="S", sections=[Section("A", plots=[PLOT])])
    html = (tmp_path / "r.html").read_text()
    assert not re.findall(r"https?://[^\"\s]+", html)
    assert {kind for _, kind in re.findall(r'src(set)?="([^,]+),', html)} == {"data:image/svg+xml;base64"}
    assert "<link" not in html
    # Names of XML namespaces are never fetched, nor those of the vocabulary of matplotlib's metadata.
    hosts = {"www.w3.org", "purl.org", "creativecommons.org"}
    assert set(re.findall(r"https?://([^/\"\s]+)", PLOT.light)) <= hosts


def test_log_axes_work_for_one_point_and_for_many() -> None:
    for points in (([8], [0.5]), ([1, 1024], [1e-3, 1e3])):
        assert "<svg" in line_plots(Plot({"s": PlotLine(*points)}, "x", "y", "t", log_x=True)).light


def test_points_with_intervals_are_drawn_without_a_line_over_powers_of_ten() -> None:
    points = PlotLine([1e6, 1e7, 1e8], [1, 2, 3], intervals=([0.5, 1.5, 2.5], [2, 3, 4]))
    drawn, joined = (
        line_plots(Plot({"s": line}, "x", "y", "t", log_x=True, log_base=10)).light
        for line in (points, points._replace(intervals=None))
    )
    assert "LineCollection" in drawn
    assert "LineCollection" not in joined
    assert all(f">{tick}<" in drawn for tick in ("1M", "10M", "100M"))


def test_gains_are_blue_and_losses_orange_as_on_the_page_of_the_server(tmp_path) -> None:
    passage = ColoredPassage("t", "", [Piece("a", 3.0), Piece("b", -3.0)], [])
    write_report(tmp_path / "r.html", title="T", subtitle="", sections=[Section("A", passages=[passage])])
    html, page = (tmp_path / "r.html").read_text(), (ROOT / "retro" / "server" / "page" / "page.css").read_text()
    shared = {"ink", "soft", "card", "helped", "hurt", "mark"}
    for name, light in THEMES["light"].items():
        of_page, of_report = (re.findall(rf"--{name}: *(#\w+)", text) for text in (page, html))
        assert of_report == [light, THEMES["dark"][name]], name
        assert of_page == of_report or (not of_page and name not in shared), name
    rules = dict(re.findall(r"\.(up2|down2) { background: var\(--(\w+)\)", html))
    assert rules == {"up2": "helped", "down2": "hurt"}


def test_bars_are_blue_with_retrieval_and_orange_without_in_both_themes() -> None:
    for is_blue, name, other in ((True, "helped", "hurt"), (False, "hurt", "helped")):
        chart = bar_chart([Bar("a", 1.0, None, is_blue)], "T")
        for drawn, theme in ((chart.light, THEMES["light"]), (chart.dark, THEMES["dark"])):
            assert theme[name] in drawn
            assert theme["card"] in drawn
            assert theme[other] not in drawn
