"""The answer of `GET /datastore`: information from the manifests, the reports and the checkpoint."""

from pathlib import Path
from typing import Any

from indexing.store.artifact import read_manifest
from indexing.store.datastore import Datastore
from indexing.store.files import read_json
from indexing.store.remote import present
from indexing.store.retrieval_set import tokenizer_fingerprint
from retro.model.presets import count_parameters
from retro.server.service import Service, datastore_name


def datastore_info(service: Service) -> dict[str, Any]:
    """Return the fields of `schemas.DatastoreResponse`."""
    retriever = service.retriever
    embedder = read_manifest(retriever.datastore.folder / "embedder")["recipe"]["settings"]["embedder.kind"]
    return {
        "datastores": [_datastore(split.folder) for split in retriever.retrieval.splits],
        "chunk_length": retriever.datastore.chunk_length,
        "vocab_size": retriever.tokenizer.vocab_size,
        "tokenizer": tokenizer_fingerprint(retriever.datastore.folder),
        "embedder": embedder,
        "dimension": retriever.embedder.dimension,
        "filters": retriever.filter_columns,
        "retrieval": ["dense", "sparse", "hybrid"] if retriever.has_terms else ["dense"],
        "model": _model(service),
        "limits": service.settings.limits,
    }


def _datastore(folder: Path) -> dict[str, Any]:
    datastore = Datastore.open(folder)
    totals = datastore.manifest["splits"]["train"]
    info: dict[str, Any] = {"name": datastore_name(folder)}
    info["fingerprint"] = datastore.fingerprint
    info |= {key: sum(totals[key]) for key in ("documents", "chunks", "tokens", "bytes")}
    report = present(folder / "report.json")
    if report.exists():
        measured = read_json(report)["index"]
        info["index"] = f"{measured['key']}, nprobe {measured['nprobe']}"
        info["recall"] = {key: value for key, value in measured.items() if key.startswith("recall")}
    return info


def _model(service: Service) -> dict[str, Any] | None:
    language_model = service.language_model
    if language_model is None:
        return None
    checkpoint = language_model.checkpoint
    return {
        "name": service.name,
        "fingerprint": checkpoint.fingerprint,
        "step": checkpoint.step,
        "parameters": count_parameters(language_model.model, embeddings=True),
        "context": language_model.context,
        "retrieval": service.retrieves,
    }
