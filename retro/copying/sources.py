"""The sources of copying, in the order of evidence, features and stored networks."""

from retro.copying.context import CONTEXT
from retro.copying.datastore import DATASTORE
from retro.copying.neighbors import NEIGHBORS
from retro.copying.source import CopySource

SOURCES: tuple[CopySource, ...] = (CONTEXT, NEIGHBORS, DATASTORE)
