"""No part of a datastore, a checkpoint or a request is ever unpickled, because unpickling can run arbitrary code."""

import ast
import pickle
from pathlib import Path

import numpy as np
import pytest

from indexing.store.errors import InputError
from indexing.store.ranged_reads import RangedArray
from indexing.store.sharded_array import open_array
from tests.test_layers import FILES, ROOT

FORBIDDEN = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
LOADERS = {("torch", "load"), ("np", "fromfile"), ("pd", "read_pickle")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_source_code_never_unpickles(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in LOADERS
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_pickled_array_is_refused_and_not_executed(tmp_path: Path) -> None:
    proof, array = tmp_path / "it-ran", tmp_path / "tokens.npy"
    np.save(array, np.array([Bomb(proof)], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match=r"tokens\.npy"):
        open_array(array)
    with pytest.raises((InputError, ValueError)):
        RangedArray([array], np.array([0, 1])).gather(np.array([0]))
    assert not proof.exists()
    pickle.loads(pickle.dumps(Bomb(proof)))
    assert proof.exists()
