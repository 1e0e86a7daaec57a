"""Equal and overlapping runs of a text are one, with a count, and runs without a word come last."""

import random

import numpy as np
import pytest

from retro.inference.verbatim_runs import (
    GeneratedRun,
    Span,
    grouped,
    grouped_runs,
    is_distinctive,
    ranges_of,
    same_tokens,
)

SHORTEST = 4


def spans_of(text: str, stored: str) -> list[Span]:
    """The longest runs of a text that occur in another one, with a letter as a token."""
    first, spans = 0, list[Span]()
    for stop in range(1, len(text) + 1):
        before = first
        while text[first:stop] not in stored:
            first += 1
        if first > before:
            spans.append(span_of(text, before, stop - 1))
    spans.append(span_of(text, first, len(text)))
    return [span for span in spans if span.stop - span.first >= SHORTEST]


def span_of(text: str, first: int, stop: int) -> Span:
    return Span(
        "d", first, stop, same_tokens(np.array([*map(ord, text[first:stop])])), is_distinctive(text[first:stop])
    )


def shown(text: str, stored: str) -> list[tuple[str, int]]:
    spans = spans_of(text, stored)
    return [(text[spans[index].first : spans[index].stop], 1 + len(others)) for index, others in grouped(spans)]


def test_repeats_are_one_run_with_a_count() -> None:
    zeros, line = "0, " * 30, "the cat sat. "
    assert shown(zeros * 3, zeros) == [(zeros, 61)]
    assert shown(f"{zeros * 2}X{line * 2}", f"{line}|{zeros}") == [(line, 2), (zeros, 31)]
    assert shown(f"{line}X{line[:9]}X{line}", line) == [(line, 2), (line[:9], 1)]


def test_a_run_that_half_of_is_in_a_longer_one_is_part_of_it_and_others_are_not() -> None:
    stored = "abcdefghij|ghijKLMN|ijKLMNOPQRSTUVW"
    assert shown("abcdefghijKLMNOPQRSTUVW", stored) == [("abcdefghij", 1), ("ijKLMNOPQRSTUVW", 2)]


@pytest.mark.parametrize(
    ("text", "distinctive"),
    [
        ("def f", True), ("_name", True), ("中文", True), ("3.14159", True), ("0x1f3d", True), ("a", True),
        ("0, 0, 0", False), ("0x00, 0x00", False), ("----\n|  |", False), ("1e5, 1e5", False), ("12 12 21", False), ("", False),
    ],
)  # fmt: skip
def test_a_word_or_a_number_of_different_digits_is_distinctive(text: str, distinctive: bool) -> None:
    assert is_distinctive(text) == distinctive


def test_every_run_is_in_one_group_of_its_datastore_whose_run_is_the_longest() -> None:
    draw = random.Random(0)
    for _ in range(200):
        ends = sorted({(draw.randrange(60), draw.randrange(4, 20)) for _ in range(draw.randrange(30))})
        spans = [
            Span(draw.choice("de"), first, first + size, draw.randrange(9), draw.random() < 0.5) for first, size in ends
        ]
        groups = grouped(spans)
        assert sorted(member for index, others in groups for member in (index, *others)) == [*range(len(spans))]
        for index, others in groups:
            assert all(spans[other].datastore == spans[index].datastore for other in others)
            assert all(
                spans[other].stop - spans[other].first <= spans[index].stop - spans[index].first for other in others
            )
        order = [(not spans[index].distinctive, spans[index].first) for index, _ in groups]
        assert order == sorted(order)
        same = [(spans[index].datastore, spans[index].same) for index, _ in groups]
        assert len(same) == len(set(same))


def test_grouping_again_changes_nothing() -> None:
    rows = [(0, 9, 0), (9, 9, 0), (4, 9, 1), (30, 12, 2), (50, 9, 0), (43, 8, 3)]
    runs = [
        GeneratedRun(
            text=(first, first + size), first_token=first, tokens=size, occurrences=1, datastore="d", places=[], distinctive=True,
            prompt_tokens=0, group=group,
        )
        for first, size, group in rows
    ]  # fmt: skip
    once = grouped_runs(runs)
    assert grouped_runs(once) == once
    assert [(run.text, run.count, run.others) for run in once] == [
        ((0, 9), 4, ((4, 18), (50, 59))),
        ((30, 42), 1, ()),
        ((43, 51), 1, ()),
    ]
    assert sum(run.count for run in once) == len(runs)


def test_ranges_that_overlap_or_touch_are_one() -> None:
    assert ranges_of([(5, 7), (0, 2), (1, 3), (3, 4)]) == ((0, 4), (5, 7))
