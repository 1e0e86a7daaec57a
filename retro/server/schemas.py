"""Every request and every answer of our part of the HTTP API; FastAPI makes the OpenAPI description of them.

What existing clients know from OpenAI stands in `openai_schemas.py`. A field that a request does not have is an error, and so is
a number that is written as a string, or is none (NaN). What the server's settings limit further, `GET /datastore` tells.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Rerank = Literal["embeddings", "bm25", "hybrid"]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Value = str | Integer | float | bool
Vector = list[float] | str
"""Numbers, or the base64 of their bytes as little-endian float32, which is read and written much faster."""


class Request(BaseModel):
    """What all requests share: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _example(**fields: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [fields]})


Filters = dict[str, Value | list[Value]]

# ----------------------------------------------------------------------------------------------------------- search


class SearchRequest(Request):
    """Texts, token ids or vectors, exactly one of the three; all are searched in one batch."""

    model_config = _example(texts=["how do I open a file"], k=2)

    texts: list[str] | None = None
    tokens: list[list[TokenId]] | None = None
    vectors: list[Vector] | None = Field(
        None,
        description="Each a list of numbers, or the base64 of their bytes as little-endian float32, which costs less.",
    )
    k: int = Field(5, ge=1)
    filters: Filters = Field(
        default_factory=dict,
        description="Column of the documents' metadata → the value it must have, or a list of values.",
    )
    rerank: Rerank = "embeddings"
    text: bool = Field(
        True, description="Whether hits say more than id, score and distance; that takes most of the time of a search."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> "SearchRequest":
        given = [name for name in ("texts", "tokens", "vectors") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of texts, tokens and vectors; found: {', '.join(given) or 'none'}")
        return self


class Hit(BaseModel):
    """A retrieved chunk, as `indexing.retrieval.retriever.Hit`; `overlaps` only where spans were asked for."""

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

    model_config = _example(text="with open(path) as file:\n    return file.read()\n", k=2)

    text: str = Field(min_length=1)
    k: int = Field(2, ge=1)
    filters: Filters = Field(default_factory=dict)
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


class NeighborTokensRequest(Request):
    """Whole chunks as token ids, for a model that lies elsewhere: it reads what its own server would read."""

    model_config = _example(chunks=[], k=2)

    chunks: list[list[TokenId]] = Field(description="Each of `chunk_length` token ids, as `GET /datastore` tells it.")
    k: int = Field(2, ge=1)


class NeighborTokensResponse(BaseModel):
    """The neighbors of each chunk, nearest first, with their continuations: k rows of 2 chunk_length token ids."""

    tokens: list[list[list[int]]]
    lengths: list[list[int]] = Field(description="How many of the ids are real, the others fill up; 0 = no neighbor.")
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

    model_config = _example(texts=["how do I open a file"])

    texts: list[str]
    encoding: Literal["float", "base64"] = "float"


class EmbedResponse(BaseModel):
    """A unit vector for each text, as numbers or, where asked for, the base64 of their bytes as little-endian float32."""

    vectors: list[Vector]


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

    model_config = _example(text="import os\nimport sys\n", k=2)

    text: str = Field(min_length=1)
    k: int = Field(2, ge=1)


class TokenScore(BaseModel):
    """A token and its log-probabilities in nats. `difference` = on − off: above 0 retrieval helped.

    Tokens that are parts of one character stand together as one, with the sums of their log-probabilities.
    """

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

    model_config = _example(prompt="import os\n", max_tokens=16, temperature=0, stream=False)

    prompt: str
    retrieval: bool = True
    k: int = Field(2, ge=1)
    max_tokens: int = Field(128, ge=1)
    temperature: float = Field(
        0.8, ge=0, le=100, description="0 takes the likeliest token, and so does what is below 0.001."
    )
    top_k: int = Field(50, ge=0, lt=2**31, description="Only the likeliest this many; 0 = all.")
    top_p: float = Field(0.95, gt=0, le=1)
    seed: Seed = 0
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, max_length=16)
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

    model_config = _example(
        error={"message": "k = 1000: at most 100.", "type": "invalid_request_error", "param": "k", "code": None}
    )

    error: dict[str, Any] = Field(description="`message`, `type`, `param`, `code`, as OpenAI's clients expect.")


class Status(BaseModel):
    """`ok`, `ready`."""

    status: str
