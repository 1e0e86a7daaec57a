"""Extract the text of an HTML page in time and memory that grow with its size, however its tags are nested.

    page ──attributes and open elements, counted in the source──► parsed ──depth──► main text

The parser and the search for the main text take (tags × depth) steps and more: a page of 500 kB that is nested 100,000
times does not end. So a page beyond a limit is refused. Blink, the engine of Chromium, nests 512 elements, and puts
deeper ones next to each other.
"""

import re
from collections import Counter

_SMALL = 1 << 15  # characters of a page that parses within a fraction of a second, whatever it holds
_MOST_DEPTH = 512
_MOST_ATTRIBUTES = 1000  # of one tag: the parser compares each with all others
_MOST_OPEN = 4096  # elements that are not closed: the parser may compare an end tag with each of them
_TAG = re.compile(
    r"<(/?+)([a-z][^\s/>]*+)"
    rf"(?:[\s/]*+[^\s/>=][^\s/>=]*+(?:\s*+=\s*+(?:\"[^\"]*+\"|'[^']*+'|[^\s>\"'][^\s>]*+))?+){{0,{_MOST_ATTRIBUTES}}}+[\s/]*+([^>])?",
    re.IGNORECASE,
)
# Elements that have no end tag, or end without one where the next of their kind begins.
_SELF_ENDING = frozenset(
    (
        "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr", "p", "li", "dt", "dd",
        "tr", "td", "th", "thead", "tbody", "tfoot", "colgroup", "caption", "option", "optgroup", "rb", "rt", "rp", "rtc", "html", "head",
        "body",
    )
)  # fmt: skip
# The parser opens these again in each paragraph after the one in which they were left open. They do not change the
# text, nor does `span`.
_FORMATTING = re.compile(r"<(/?)(?:b|big|code|em|font|i|nobr|s|small|strike|strong|tt|u)(?=[\s/>])", re.IGNORECASE)
_MOST_REOPENED = 1 << 21  # elements that formatting may add


class TooNested(Exception):
    """A page that cannot be read in time that grows with its size."""


def main_text(page: str) -> str:
    """The main text of a page, without navigation and other parts that repeat on a site.

    Raises:
        TooNested: its elements are nested too deeply, or a tag has too many attributes.
        ImportError: the package resiliparse is not installed.
    """
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    num_tags = page.count("<")
    if len(page) > _SMALL:
        _check_tags(page, num_tags)
    if num_tags**2 > _MOST_REOPENED and num_tags * len(_FORMATTING.findall(page)) > _MOST_REOPENED:
        page = _FORMATTING.sub(r"<\1span", page)
    tree = HTMLTree.parse(page)
    # A tag opens at most four elements: `<table><td>` has <tbody> and <tr> between. Matching from the right compares
    # each element with at most as many above it as the selector has.
    document = tree.document if 4 * num_tags > _MOST_DEPTH else None
    if document is not None and document.query_selector(" > ".join("*" * (_MOST_DEPTH + 1))) is not None:
        raise TooNested(f"its elements are nested more than {_MOST_DEPTH} deep")
    return extract_plain_text(tree, main_content=True)


def _check_tags(page: str, num_tags: int) -> None:
    """Refuse a page whose parsing takes more than a bounded number of steps for each tag."""
    opened, num_open, may_nest = Counter[str](), 0, num_tags > _MOST_OPEN
    for tag in _TAG.finditer(page):
        if tag[3]:
            raise TooNested(f"a tag <{tag[2][:40]}> has more than {_MOST_ATTRIBUTES:,} attributes")
        if not may_nest:
            continue
        name = tag[2].lower()
        if name in _SELF_ENDING or tag[0].endswith("/"):  # such as <path/> in a picture
            continue
        if not tag[1]:
            opened[name] += 1
            num_open += 1
        elif opened[name]:
            opened[name] -= 1
            num_open -= 1
        if num_open > _MOST_OPEN:
            raise TooNested(f"more than {_MOST_OPEN:,} of its elements are open at once")
