"""A folder in the memory of this process."""

import uuid
from collections.abc import Iterator

import fsspec
import pytest


@pytest.fixture
def memory_url() -> Iterator[str]:
    folder = f"memory://{uuid.uuid4().hex}"
    yield folder
    fsspec.filesystem("memory").rm(folder, recursive=True)
