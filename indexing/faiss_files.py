"""Faiss indexes on disk, and what is inside them."""

from pathlib import Path
from typing import Any

from indexing.store.errors import InputError
from indexing.store.remote import present


def write_index(path: Path, index: Any) -> None:
    """`faiss.write_index` through a file of Python's: Faiss's own reports success when the last block finds a full disk."""
    import faiss

    with open(path, "wb") as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))  # type: ignore[attr-defined]


def read_index(path: Path) -> Any:
    """`faiss.read_index`; of a URL, the file is fetched.

    Raises:
        InputError: the file is missing or damaged.
    """
    import faiss

    path = present(path)
    try:
        return faiss.read_index(str(path))
    except RuntimeError as error:
        raise InputError(f"{path} cannot be read: {error}. Run `retro index` again.") from error


def ivf_of(index: Any) -> Any | None:
    """The IVF part of an index, as what it is (`IndexIVFPQ`, …; Faiss says only `IndexIVF`), or None where it has none."""
    import faiss

    found = faiss.try_extract_index_ivf(index)
    return None if found is None else faiss.downcast_index(found)
