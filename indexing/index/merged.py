"""All shards of an index in one, its inverted lists on disk: for serving from less memory than the index has bytes.

index/merged/merged.faiss      quantizers and where the lists lie
             merged.ivfdata    all lists, each in one piece, mapped into memory as they are visited
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from indexing.index.faiss_files import ivf_of, read_index, write_index
from indexing.store.artifact import parse_manifest
from indexing.store.errors import InputError
from indexing.store.remote import fetch_manifest, present


def merge_shards(work: Path, trained: Path, shards: Sequence[Path], *, advance: Callable[[int], None]) -> int:
    """Write `work/merged.faiss` and `work/merged.ivfdata`; memory stays at one list of every shard.

    Args:
        work: folder to write into.
        trained: the folder of the trained index.
        shards: the folders of the filled ones.
        advance: told of merged vectors.

    Returns:
        the number of vectors.

    Raises:
        InputError: the index has no inverted lists, or lists that cannot be merged (Faiss 1.15.1: fast-scan, which our own
            key stores as plain codes).
    """
    import faiss
    from faiss.contrib.ondisk import merge_ondisk

    index = read_index(trained / "trained.faiss")
    ivf = ivf_of(index)
    if ivf is None or not isinstance(ivf, (faiss.IndexIVFFlat, faiss.IndexIVFPQ, faiss.IndexIVFScalarQuantizer)):
        raise InputError(
            f"{trained}: only inverted lists of plain codes can be merged on disk; search the shards as they are."
        )
    merge_ondisk(index, [str(shard / "vectors.faiss") for shard in shards], str(work / "merged.ivfdata"))
    write_index(work / "merged.faiss", index)
    advance(int(index.ntotal))
    return int(index.ntotal)


def is_merged(folder: Path, shards: Sequence[Path]) -> bool:
    """Whether the artifact `folder` was merged from just these shards, as they are now: no fewer, and none since changed."""
    if not fetch_manifest(folder):
        return False
    return parse_manifest(folder)["recipe"]["inputs"] == {
        shard.name: parse_manifest(shard)["fingerprint"] for shard in shards
    }


def open_merged(folder: Path) -> Any:
    """The merged index of the artifact `folder`, whose lists stay on disk."""
    import faiss

    present(folder)
    return faiss.read_index(str(folder / "merged.faiss"), faiss.IO_FLAG_ONDISK_SAME_DIR)
