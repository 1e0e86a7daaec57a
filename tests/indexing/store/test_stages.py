"""Which stages remain if some are left out."""

import pytest

from indexing.store.stages import NEEDS, before, left_out
from pipelines.stages.table import STAGES

VECTORS = {"embed", "train-index", "add"}


def test_every_stage_comes_after_those_that_it_needs() -> None:
    names = list(STAGES)
    assert {"chunk", *NEEDS} == {*names}
    assert all(before(name) == [stage for stage in names if stage in before(name)] for name in names)
    assert all(names.index(needed) < names.index(name) for name, needed in NEEDS.items())


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [
        ((), set()),
        (("votes",), {"votes"}),
        (("suffixes",), {"suffixes", "votes"}),
        (("sparse",), {"sparse"}),
        (("ngrams",), {"ngrams"}),
        (("neighbors",), {*VECTORS, "ngrams", "neighbors", "materialize", "merge"}),
        (("embed",), {*VECTORS, "ngrams", "neighbors", "materialize", "merge"}),
        (("add", "votes"), {*VECTORS, "ngrams", "neighbors", "materialize", "merge", "votes"}),
    ],
)
def test_a_stage_is_left_out_with_those_that_need_it_and_that_serve_it_only(
    skipped: tuple[str, ...], expected: set[str]
) -> None:
    assert left_out(skipped) == expected
