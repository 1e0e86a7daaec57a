"""HTML pages that a parser or an extractor cannot read in bounded time are refused, and other pages have equal texts."""

from pathlib import Path

import pytest

pytest.importorskip("resiliparse")

from indexing.corpus import html_pages
from indexing.corpus.html_pages import TooNested, main_text
from tests.indexing.corpus.reading import read
from tests.indexing.corpus.test_web_archives import PAGE, PAGE_TEXT, response

ROWS = "<table>" + "<tr><td><b>A cell</b> of a large table" * 3000


@pytest.mark.parametrize(
    "page",
    [
        "<div>" * 100_000 + "text",
        "<div>" * 600 + "text",
        "<x>" * 100_000 + "</y>" * 100_000,  # each end tag is compared with each open element
        "<ul><li>text" * 20_000,
        "<i><div>x</i>" * 4000,  # misnested: the parser moves elements
        "".join(
            f"<p><b id={number}></p>" for number in range(10_000)
        ),  # each paragraph opens all again: 50 million elements
        "<div " + " ".join(f"a{number}" for number in range(100_000)) + ">text",
        "<div " + " ".join(f"a{number}='>'" for number in range(100_000)) + ">text",
    ],
)
def test_a_page_that_would_take_quadratic_time_is_refused(page: str) -> None:
    with pytest.raises(TooNested):
        main_text(page)


@pytest.mark.parametrize(
    "page",
    [
        PAGE,
        ROWS,
        "<p>One of many paragraphs<br>with a line" * 5000,
        "<div>" * 400 + "deep" + "</div>" * 400,
        "<body>" + "<svg>" + "<path d='M0 0'/>" * 5000 + "</svg><p>A picture above",
        "<body><p>"
        + "".join(f"<i class='icon-{number}'></i>item {number} <a href=x>link</a> " for number in range(3000)),
    ],
)
def test_a_long_or_deep_page_keeps_its_text(page: str) -> None:
    from resiliparse.extract.html2text import extract_plain_text

    assert main_text(page) == extract_plain_text(page, main_content=True) != ""


def test_many_formatting_tags_do_not_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "<body><p>Some <B class=x>bold <i>and</b> slanted</i> <code>text</code>, <br> <sub>below</sub> <u\n>under</u></p><p>End</p>"
    expected = main_text(page)
    monkeypatch.setattr(html_pages, "_MOST_REOPENED", 0)
    assert main_text(page) == expected != ""


def test_a_nested_page_is_reported_and_the_next_one_is_read(tmp_path: Path) -> None:
    deep = response(b"<div>" * 100_000, "http://a", "text/html")
    (tmp_path / "d.warc").write_bytes(deep + response(PAGE.encode(), "http://b", "text/html; charset=utf-8"))
    documents, problems = read(tmp_path / "d.warc")
    assert [(each.id, each.text) for each in documents] == [("http://b", PAGE_TEXT)]
    assert [(each.kind, each.line) for each in problems] == [("nested page", 1)]
    assert problems[0].detail == "more than 4,096 of its elements are open at once; it is left out"
