"""Open the sorted prefixes of a datastore, with a status for the progress."""

from pathlib import Path

from indexing.progress import during
from indexing.store.remote import cache_folder, datastore_name, url_of
from indexing.suffixes.search import SuffixIndex


def open_sorted_prefixes(folder: Path) -> SuffixIndex:
    """Open the sorted prefixes of a datastore.

    They are memory-mapped, with all tokens. So of a datastore at a URL both are fetched whole, shard by shard, unless the cache
    has them.

    Raises:
        InputError: there are none, a file is missing or damaged, or the URL cannot be read.
    """
    message = f"opening the sorted prefixes of {datastore_name(folder)}"
    if url_of(folder) is not None:
        message = f"fetching all tokens and sorted prefixes of {datastore_name(folder)} into {cache_folder()}"
    with during("%s", message):
        return SuffixIndex.open(folder)
