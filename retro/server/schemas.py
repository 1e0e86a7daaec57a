"""Every request and every answer of the HTTP API, with its limits; FastAPI makes the OpenAPI description of them.

What is ours stands first, what existing clients know from OpenAI after it. A field that a request does not have is an error.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Rerank = Literal["embeddings", "bm25", "hybrid"]


class Request(BaseModel):
    """What all requests share: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


# ----------------------------------------------------------------------------------------------------------- search


class SearchRequest(Request):
    """Texts, token ids or vectors, exactly one of the three; all are searched in one batch."""

    texts: list[str] | None = None
    tokens: list[list[int]] | None = None
    vectors: list[list[float]] | None = None
    k: int = Field(5, ge=1)
    filters: dict[str, str | int | float | bool | list[str | int | float | bool]] = Field(
        default_factory=dict,
        description="Column of the documents' metadata → the value it must have, or a list of values.",
    )
    rerank: Rerank = "embeddings"


class Hit(BaseModel):
    """A retrieved chunk, as `indexing.retriever.Hit`; `overlaps` only where spans were asked for."""

    chunk_id: int
    score: float = Field(description="What hits are ordered by, larger is nearer; its scale is that of `rerank`.")
    distance: float = Field(description="Squared L2 distance of the unit vectors, 0 to 4.")
    text: str
    continuation: str
    document_id: str
    title: str
    source: str
    metadata: dict[str, Any]


class SearchResponse(BaseModel):
    """Hits of each query, nearest first."""

    results: list[list[Hit]]
    partial: bool = Field(False, description="Whether a part of the index did not answer.")
    missing: list[str] = Field(default_factory=list, description="The parts that did not answer.")


class NeighborsRequest(Request):
    """A text whose chunks are searched one by one, as in training."""

    text: str
    k: int = Field(2, ge=1)
    filters: dict[str, Any] = Field(default_factory=dict)
    rerank: Rerank = "embeddings"


class Span(BaseModel):
    """A run of tokens that a chunk shares with a neighbor, as [start, stop) of characters of both texts.

    `neighbor` counts in `text + continuation` of the hit.
    """

    chunk: tuple[int, int]
    neighbor: tuple[int, int]
    tokens: int


class NeighborHit(Hit):
    """A neighbor of a chunk and what they share, longest run first, of at least 3 tokens."""

    overlap: float = Field(
        description="Longest common run of tokens over the chunk's length, r of the paper's section 2.7."
    )
    spans: list[Span]


class Chunk(BaseModel):
    """One chunk of the text that was asked about."""

    text: str
    tokens: int
    neighbors: list[NeighborHit]


class NeighborsResponse(BaseModel):
    """The chunks of a text in order."""

    chunks: list[Chunk]
    partial: bool = False
    missing: list[str] = Field(default_factory=list)


class StoredChunk(BaseModel):
    """A chunk of the datastore by id, with where it stands."""

    chunk_id: int
    text: str
    continuation: str
    previous_chunk_id: int | None
    next_chunk_id: int | None
    document_id: str
    title: str
    source: str
    metadata: dict[str, Any]


class StoredDocument(BaseModel):
    """A document of the datastore by id: `chunks` from `first` on, as many as were asked for."""

    document_id: str
    title: str
    source: str
    metadata: dict[str, Any]
    num_chunks: int
    first: int
    chunks: list[StoredChunk]


class EmbedRequest(Request):
    """Texts of any length."""

    texts: list[str]


class EmbedResponse(BaseModel):
    """A unit vector for each text."""

    vectors: list[list[float]]


class DatastoreResponse(BaseModel):
    """What is served: totals of the datastores, what the report measured of the index, and the checkpoint, if there is one."""

    datastores: list[dict[str, Any]] = Field(
        description="`name`, `fingerprint`, `documents`, `chunks`, `tokens`, `bytes`, `index`, `recall` … of each."
    )
    chunk_length: int
    vocab_size: int
    embedder: str
    dimension: int
    filters: list[str] = Field(description="Columns of the metadata that `filters` may name.")
    model: dict[str, Any] | None = Field(
        description="`name`, `fingerprint`, `step`, `parameters`, `context`, `retrieval`."
    )
    limits: dict[str, int | float]


# ------------------------------------------------------------------------------------------------------------ model


class ScoreRequest(Request):
    """A text to score token by token, retrieval ON with k neighbors and OFF."""

    text: str
    k: int = Field(2, ge=1)


class TokenScore(BaseModel):
    """A token and its log-probabilities in nats. `difference` = on − off: above 0 retrieval helped."""

    text: str
    on: float | None
    off: float
    difference: float | None


class ScoreResponse(BaseModel):
    """`tokens` in order; their texts joined are the text that was scored."""

    tokens: list[TokenScore]
    bits_per_byte_on: float | None
    bits_per_byte_off: float


class GenerateRequest(Request):
    """A prompt to continue; `stream` answers with server-sent events, one `GenerateEvent` each."""

    prompt: str
    retrieval: bool = True
    k: int = Field(2, ge=1)
    max_tokens: int = Field(128, ge=1)
    temperature: float = Field(0.8, ge=0)
    top_k: int = Field(50, ge=0)
    top_p: float = Field(0.95, gt=0, le=1)
    seed: int = Field(0, ge=0)
    stop: list[str] = Field(default_factory=list, max_length=16)
    stream: bool = False


class GenerateResponse(BaseModel):
    """The continuation without the prompt. `finish_reason`: `stop` (end of document or a stop string) or `length`."""

    text: str
    tokens: int
    finish_reason: Literal["stop", "length"]


class GenerateEvent(BaseModel):
    """A piece of text; the last event has a `finish_reason`."""

    text: str
    finish_reason: Literal["stop", "length"] | None = None


class ErrorResponse(BaseModel):
    """Every error of the API: a reason for people, and a word for programs."""

    error: dict[str, Any] = Field(description="`message`, `type`, `param`, `code`, as OpenAI's clients expect.")
