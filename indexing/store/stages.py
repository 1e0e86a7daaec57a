"""Which stages of a datastore need others, and which ones remain if some are left out."""

from collections.abc import Collection
from typing import Literal

StageName = Literal[
    "chunk",
    "embed",
    "train-index",
    "add",
    "sparse",
    "ngrams",
    "neighbors",
    "materialize",
    "merge",
    "suffixes",
    "votes",
]
"""The stages, in the order of a build."""

SkippedStage = Literal["embed", "train-index", "add", "sparse", "ngrams", "neighbors", "suffixes", "votes"]
"""Stages that a build can leave out. All others read chunks; `materialize` and `merge` run only on request."""

NEEDS: dict[str, str] = {
    "embed": "chunk",
    "train-index": "embed",
    "add": "train-index",
    "sparse": "chunk",
    "ngrams": "chunk",
    "neighbors": "add",
    "materialize": "neighbors",
    "merge": "add",
    "suffixes": "chunk",
    "votes": "suffixes",
}
"""The stage that must be finished before another one."""

_SERVE = {"neighbors": ("embed", "train-index", "add", "ngrams")}
"""Stages that are left out with another one, because a build makes them for it."""


def before(stage: str) -> list[str]:
    """All stages that must be finished before another one, in the order of a build."""
    needed = NEEDS.get(stage)
    return [*before(needed), needed] if needed else []


def left_out(skipped: Collection[str]) -> frozenset[str]:
    """The stages that a build leaves out if the setting `skip_stages` names some: also those that need them, and that
    serve them only."""
    out = _with_dependents(skipped)
    return _with_dependents(out.union(*(_SERVE.get(stage, ()) for stage in out)))


def _with_dependents(stages: Collection[str]) -> frozenset[str]:
    """Some stages, and all that need one of them."""
    return frozenset(stages).union(stage for stage in NEEDS if not set(stages).isdisjoint(before(stage)))
