"""Use other datastores: the chunks to retrieve, and the weights of their lexical embedder."""

import os
import shutil
from pathlib import Path

from indexing.embedding.settings import EmbedderSettings
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.remote import present
from indexing.store.retrieval_set import check_searchable, check_tokenizer, embedder_identity
from pipelines.config import Config


def retrieved_from(config: Config) -> list[Datastore]:
    """Open the datastores of `neighbors.extra_datastores`, in order.

    Raises:
        InputError: one is missing, not searchable, named twice, or has a different embedder.
    """
    own, others = Datastore.open(config.datastore), list[Datastore]()
    for folder in config.neighbors.extra_datastores:
        other = Datastore.open(folder)
        if other.folder.resolve() in [earlier.folder.resolve() for earlier in (own, *others)]:
            raise InputError(
                f"neighbors.extra_datastores names {folder} twice, or the datastore itself: name each other datastore once."
            )
        other.require("add")
        check_searchable(own, other)
        others.append(other)
    return others


def manifest_entries(config: Config) -> list[dict[str, str]]:
    """Relative path of each of these datastores, and the fingerprint of its chunks; both are needed to read stored ids."""
    base = config.datastore.resolve()
    return [
        {"folder": os.path.relpath(other.folder.resolve(), base), "chunks": other.manifest["fingerprints"]["chunk"]}
        for other in retrieved_from(config)
    ]


def embedder_files(datastore: Datastore, settings: EmbedderSettings) -> dict[str, str]:
    """File name → checksum of the lexical embedder in the datastore at `embedder.path`.

    Raises:
        InputError: there is none, or it was made for another tokenizer.
    """
    other = Datastore.open(settings.path)
    other.require("embed")
    check_tokenizer(datastore, other, "embedder.path")
    files = embedder_identity(other)
    if isinstance(files, str):
        raise InputError(
            f"embedder.path: {other.folder} has a transformer. Set embedder.kind = 'transformer' and embedder.path to its model."
        )
    return files


def copy_embedder(datastore: Datastore, settings: EmbedderSettings, work: Path) -> None:
    """Copy this embedder to the folder `work`."""
    for name in embedder_files(datastore, settings):
        shutil.copyfile(present(Path(settings.path) / "embedder" / name), work / name)
