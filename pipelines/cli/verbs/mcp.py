"""`retro mcp DATASTORE`: tools of the Model Context Protocol (MCP), with which an assistant searches a datastore.

assistant (Claude, Cursor, VS Code …) ─► starts this process ─► JSON-RPC on standard input and output ─► search, read ─► Retriever

https://modelcontextprotocol.io/specification
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

import numpy as np

from indexing.store.errors import InputError
from indexing.store.settings import settings

if TYPE_CHECKING:
    from mcp.server import MCPServer

    from indexing.retrieval.retriever import Retriever

_MOST_HITS, _MOST_CHUNKS = 50, 128  # of one answer, which takes a part of the assistant's context


@settings
class McpOptions:
    """Let assistants search a datastore, over the Model Context Protocol (MCP) on standard input and output."""

    extra_datastores: tuple[str, ...] = ()
    """More datastores to search together with the first one."""


@dataclass(frozen=True)
class Passage:
    """A hit of `search`: a chunk and the next one of its document.

    Attributes:
        chunk: position of the chunk in its document, from 0.
        score: orders the passages, larger is better.
    """

    document_id: str
    title: str
    source: str
    chunk: int
    score: float
    text: str


@dataclass(frozen=True)
class Pages:
    """Consecutive chunks of a document.

    Attributes:
        num_chunks: chunks of the whole document.
        next_chunk: `first_chunk` of a call that continues this one; None at the end of the document.
    """

    document_id: str
    title: str
    source: str
    num_chunks: int
    next_chunk: int | None
    text: str


def mcp(datastore: str, options: McpOptions) -> int:
    """`retro mcp DATASTORE`: answer until the client closes standard input."""
    from indexing.retrieval.retriever import Retriever

    server = make_server(Retriever.open(datastore, *options.extra_datastores))
    # Python's handler would wait for the thread that reads standard input.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    server.run("stdio")
    return 0


def make_server(retriever: "Retriever") -> "MCPServer":
    """Create the server of the tools `search` and `read`; the docstrings are the descriptions that assistants read.

    Raises:
        InputError: the package `mcp` is missing.
    """
    try:
        from mcp.server import MCPServer
        from mcp_types import ToolAnnotations
    except ImportError as error:
        raise InputError("retro mcp needs the package mcp: pip install 'retro[mcp]'.") from error
    from pydantic import Field

    sets = retriever.retrieval
    server = MCPServer(
        "retro",
        version=version("retro"),
        instructions=f"Search {sum(split.num_documents for split in sets.splits):,} documents and read the parts that are relevant.",
    )
    reads_only = ToolAnnotations(read_only_hint=True, open_world_hint=False)

    @server.tool(annotations=reads_only)
    def search(
        query: Annotated[str, Field(description="A question, a sentence or words.")],
        k: Annotated[int, Field(ge=1, le=_MOST_HITS, description="Number of passages.")] = 5,
    ) -> list[Passage]:
        """Find the passages of the documents that answer a question or resemble a text, best first."""
        with _mistakes():
            hits = retriever.search([query], k, retrieval=retriever.chunks.best).hits[0]
        positions = sets.positions_in_documents(np.array([hit.chunk_id for hit in hits], dtype=np.int64)).tolist()
        return [
            Passage(hit.document_id, hit.title, hit.source, position, hit.score, hit.text + hit.continuation)
            for hit, position in zip(hits, positions, strict=True)
        ]

    @server.tool(annotations=reads_only)
    def read(
        document_id: Annotated[str, Field(description="`document_id` of a passage.")],
        first_chunk: Annotated[int, Field(ge=0, lt=2**40, description="First chunk to read, from 0.")] = 0,
        num_chunks: Annotated[int, Field(ge=1, le=_MOST_CHUNKS, description="Largest number of chunks to read.")] = 16,
    ) -> Pages:
        """Read a document, or the part around a passage: its `chunk` is a position in the document."""
        with _mistakes():
            document = retriever.lookup.document(document_id, first_chunk, num_chunks)
        stop = first_chunk + len(document.chunks)
        return Pages(
            document.document_id,
            document.title,
            document.source,
            document.num_chunks,
            stop if stop < document.num_chunks else None,
            "".join(part.text for part in document.chunks),
        )

    return server


@contextmanager
def _mistakes() -> Iterator[None]:
    """Turn mistakes in a call into errors that the assistant can read; others are logged."""
    from mcp.server.mcpserver.exceptions import ToolError

    try:
        yield
    except InputError as error:
        raise ToolError(str(error)) from error
