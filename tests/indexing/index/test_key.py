"""The choice of an index key, with autofaiss and without it."""

import importlib.util
import re
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexing.index.build import IndexSettings
from indexing.index.key import autofaiss_proposal, choose_key, proposal
from indexing.store.errors import InputError

needs_autofaiss = pytest.mark.skipif(not importlib.util.find_spec("autofaiss"), reason="autofaiss is not installed")


@needs_autofaiss
@given(
    num_vectors=st.one_of(st.integers(1, 10**6), st.integers(10**6, 10**11)),
    dimension=st.integers(1, 4096),
    size=st.one_of(st.integers(1, 5000).map(str), st.floats(0.1, 5000).map(lambda size: f"{size:.2f}")),
    unit=st.sampled_from(["B", "KB", "MB", "GB", "TB"]),
)
def test_the_proposal_is_that_of_autofaiss(num_vectors: int, dimension: int, size: str, unit: str) -> None:
    assert proposal(num_vectors, dimension, size + unit) == autofaiss_proposal(num_vectors, dimension, size + unit)


@needs_autofaiss
@pytest.mark.parametrize("num_vectors", [1, 999_999, 1_000_000, 9_999_999, 10_000_000, 299_999_999, 300_000_000])
@pytest.mark.parametrize("memory", ["500MB", "4GB", "16GB", "1.5TB"])
def test_the_proposal_is_that_of_autofaiss_where_its_rules_change(num_vectors: int, memory: str) -> None:
    for dimension in (4, 5, 64, 255, 256, 257, 384, 1024):
        assert proposal(num_vectors, dimension, memory) == autofaiss_proposal(num_vectors, dimension, memory)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [(10, r"Flat"), (19_999, r"Flat"), (60_000, r"IVF\d+,PQ128x4"), (10_000_000, r"IVF\d+_HNSW32,PQ128x4")],
)
def test_key_follows_from_the_number_of_chunks(chunks: int, expected: str) -> None:
    assert re.fullmatch(expected, choose_key(chunks, 256, IndexSettings()))


def test_factory_setting_overrides_the_key_and_codes_select_autofaiss() -> None:
    assert choose_key(10, 256, IndexSettings(factory="IVF4,SQ8")) == "IVF4,SQ8"
    assert choose_key(100_000, 256, IndexSettings(codes="pq")).startswith("OPQ")


def test_no_chunk_at_all_gets_a_flat_index() -> None:
    assert choose_key(0, 256, IndexSettings(flat_below=0)) == "Flat"


def test_a_blank_before_the_unit_of_memory_changes_nothing() -> None:
    assert choose_key(10**6, 256, IndexSettings(memory="4 GB")) == choose_key(10**6, 256, IndexSettings(memory="4GB"))


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(InputError, match=r"index\.memory = 1MB"):
        choose_key(10_000_000, 256, IndexSettings(memory="1MB"))


@needs_autofaiss
def test_an_autofaiss_that_does_not_import_is_named_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "autofaiss.external", types.ModuleType("autofaiss.external"))  # no package
    monkeypatch.delitem(sys.modules, "autofaiss.external.optimize", raising=False)
    with pytest.raises(InputError, match=r"autofaiss .*pip uninstall autofaiss"):
        choose_key(10**6, 256, IndexSettings())
