"""Datasets that Hugging Face `datasets` saved with `save_to_disk`: a folder, or one for each split of a `DatasetDict`.

state.json      {"_data_files": [{"filename": "data-00000-of-00002.arrow"}, …], …}
data-*.arrow    the rows, in Arrow's stream format
cache-*.arrow   results of `map` and `filter` that were stored later, which are not part of the dataset
"""

import posixpath
from collections.abc import Collection
from typing import Any

from indexing.corpus.tables import ARROW_SUFFIX
from indexing.store.errors import InputError
from indexing.store.files import parse_json

_STATE = "state.json"


def foreign_files(filesystem: Any, paths: Collection[str]) -> frozenset[str]:
    """Arrow files among `paths` in the folder of a saved dataset that are not part of the dataset.

    Args:
        filesystem: of fsspec.
        paths: files of a folder or a glob.

    Raises:
        InputError: `paths` has the `state.json` of a dataset, but not all of its Arrow files; or the `state.json` is
            damaged, or selects rows, as those of early versions of `datasets` could.
    """
    folders: dict[str, set[str]] = {}
    for path in paths:
        folder, name = posixpath.split(path)
        if name == _STATE or name.lower().endswith(ARROW_SUFFIX):
            folders.setdefault(folder, set()).add(name)
    foreign = set[str]()
    for folder, found in folders.items():
        state_path = posixpath.join(folder, _STATE)
        names = _data_files(filesystem, state_path)
        if names is None:
            continue
        missing = [name for name in names if name not in found]
        if missing and state_path in paths:
            raise InputError(
                f"{state_path} names {missing[0]}, which is missing. Copy the folder or save the dataset again."
            )
        foreign |= {posixpath.join(folder, name) for name in found.difference(names)}
    return frozenset(foreign)


def _data_files(filesystem: Any, path: str) -> list[str] | None:
    """The file names that the `state.json` at `path` lists; None if there is none, or it is not of `datasets`."""
    try:
        state = parse_json(filesystem.cat_file(path)) if filesystem.isfile(path) else None
        if not isinstance(state, dict) or "_data_files" not in state:
            return None
        names = [str(file["filename"]) for file in state["_data_files"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise InputError(
            f"{path} cannot be read: {problem}. Save the dataset again, or name its .arrow files."
        ) from error
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise InputError(
            f"{path} selects rows by an index. Load the dataset with a new version of `datasets`, and save it again."
        )
    return names
