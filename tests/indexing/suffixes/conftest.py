"""A datastore with sorted prefixes."""

import pytest

from indexing.store.datastore import Datastore
from tests.conftest import build_local, tiny_config, write_corpus


@pytest.fixture(scope="module")
def datastore(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    folder = tmp_path_factory.mktemp("suffixes")
    config = tiny_config(folder, write_corpus(folder / "corpus.jsonl", 60))
    build_local(config, only="chunk")
    return build_local(config, only="suffixes")
