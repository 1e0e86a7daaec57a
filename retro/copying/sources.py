"""The sources of copying, in the order of evidence, features and stored networks."""

from dataclasses import replace

from retro.copying.context import CONTEXT
from retro.copying.datastore import DATASTORE
from retro.copying.neighbors import NEIGHBORS
from retro.copying.source import CopySource
from retro.model_settings import CopyHeadSettings

SOURCES: tuple[CopySource, ...] = (CONTEXT, NEIGHBORS, DATASTORE)
_ADDED = (replace(CONTEXT, switched=True), NEIGHBORS, DATASTORE)


def sources_of(settings: CopyHeadSettings) -> tuple[CopySource, ...]:
    """`SOURCES`; if the context was added to a trained model, it must earn trust too (`switch.py`)."""
    return _ADDED if settings.context_added else SOURCES
