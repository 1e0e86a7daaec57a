"""Merge all shards of an index into one with inverted lists on disk, to serve with less memory than the index has
bytes.

index/merged/merged.faiss      quantizers and the positions of the lists
             merged.ivfdata    all lists, mapped into memory as searches visit them
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from indexing.index.faiss_files import ivf_of, read_index, write_index
from indexing.progress import Advance
from indexing.store.artifact import parse_manifest, reading
from indexing.store.errors import InputError
from indexing.store.mapped import registered
from indexing.store.remote import fetch_manifest, present

LISTS = "merged.ivfdata"


def merge_shards(work: Path, trained: Path, shards: Sequence[Path], *, advance: Advance) -> int:
    """Write `work/merged.faiss` and `work/merged.ivfdata`. Memory holds one list of every shard at a time.

    Args:
        work: folder to write into.
        trained: folder of the trained index.
        shards: folders of the filled shards.
        advance: called with the number of merged vectors.

    Returns:
        the number of vectors.

    Raises:
        InputError: the index has no inverted lists, or Faiss cannot merge them (1.15.1: fast-scan lists; the default
            key stores plain codes).
    """
    import faiss
    from faiss.contrib.ondisk import merge_ondisk

    index = read_index(trained / "trained.faiss")
    ivf = ivf_of(index)
    if ivf is None or not isinstance(ivf, (faiss.IndexIVFFlat, faiss.IndexIVFPQ, faiss.IndexIVFScalarQuantizer)):
        raise InputError(
            f"{trained}: only inverted lists of plain codes can be merged on disk. Search the shards without merging."
        )
    merge_ondisk(index, [str(shard / "vectors.faiss") for shard in shards], str(work / LISTS))
    # The name without its temporary folder: equal input gives equal bytes, and `open_merged` looks only for the name.
    lists: Any = faiss.downcast_InvertedLists(ivf.invlists)  # type: ignore[arg-type]
    lists.filename = LISTS
    write_index(work / "merged.faiss", index)
    advance(int(index.ntotal))
    return int(index.ntotal)


def is_merged(folder: Path, shards: Sequence[Path]) -> bool:
    """True if the artifact `folder` was merged from exactly these shards in their current state."""
    if not fetch_manifest(folder):
        return False
    return parse_manifest(folder)["recipe"]["inputs"] == {
        shard.name: parse_manifest(shard)["fingerprint"] for shard in shards
    }


def open_merged(folder: Path) -> Any:
    """Open the merged index of the artifact `folder`; its lists stay on disk."""
    import faiss

    present(folder)
    with reading(folder):
        registered(folder / LISTS)
        return faiss.read_index(str(folder / "merged.faiss"), faiss.IO_FLAG_ONDISK_SAME_DIR)
