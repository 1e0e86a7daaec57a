"""Conversion from half precision is exact."""

import numpy as np

from indexing.index.floats import to_float32


def test_every_float16_converts_to_the_same_number_in_float32(tmp_path) -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    np.save(tmp_path / "halves.npy", halves)
    wanted = halves.astype(np.float32)
    for rows in (halves, np.load(tmp_path / "halves.npy", mmap_mode="r")):
        assert np.array_equal(to_float32(rows), wanted, equal_nan=True)
