"""Import from and export to Hugging Face, and copying for any decoder of transformers."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import `DatastoreLogitsProcessor` when it is needed: transformers takes seconds to import, and is optional."""
    if name != "DatastoreLogitsProcessor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from retro.huggingface.logits_processor import DatastoreLogitsProcessor

    return DatastoreLogitsProcessor
