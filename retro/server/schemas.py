"""Requests and answers of the HTTP API. FastAPI creates the OpenAPI description from these classes.

`openai/schemas.py` has those of OpenAI's API. Unknown fields are errors, and so are numbers written as strings and NaN.
`GET /datastore` returns the limits that the server's settings add.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from indexing.retrieval.queries import Retrieval
from indexing.retrieval.results import Hit
from indexing.suffixes.search import SHORTEST_RUN
from retro.inference.settings import BOUNDS
from retro.inference.source_texts import Sources
from retro.inference.verbatim_runs import TracedRun


def _as_integer(value: object) -> Any:
    """Convert 2.0 to 2, as JSON Schema's `integer` includes it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("the text to search for is empty.")
    return text


INTEGER = BeforeValidator(_as_integer)
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63), INTEGER]
Natural = Annotated[int, Field(ge=0), INTEGER]
Positive = Annotated[int, Field(ge=1), INTEGER]
TokenId = Annotated[int, Field(ge=0, lt=2**32), INTEGER]
Seed = Annotated[int, Field(ge=0, lt=2**63), INTEGER]
LONGEST_STOP, MOST_STOPS = 1024, 16  # characters of a stop string; their number
SearchedText = Annotated[str, Field(json_schema_extra={"pattern": r"\S"}), AfterValidator(_not_blank)]
Value = str | Integer | float | bool
Vector = list[float] | str
"""Numbers, or their little-endian float32 bytes in base64, which are much faster to read and write."""


class Request(BaseModel):
    """Base of all requests: rejects unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def bounded(name: str, default: Any = ..., description: str | None = None) -> Any:
    """Return the field of a generation setting with its least and largest value."""
    least, largest = BOUNDS[name]
    return Field(default, ge=least, le=largest, description=description)


def example(**fields: Any) -> ConfigDict:
    """Return the configuration of a request with an example."""
    return ConfigDict(json_schema_extra={"examples": [fields]})


Filters = dict[str, Value | list[Value]]
SEARCHED_DATASTORE: Any = Field(
    "", description="Name of the only datastore to search, see `GET /datastore`; empty = all."
)

# ----------------------------------------------------------------------------------------------------------- search


class SearchRequest(Request):
    """Queries: exactly one of texts, token ids and vectors. All are searched in one batch."""

    model_config = example(texts=["how do I open a file"], k=2)

    texts: list[SearchedText] | None = None
    tokens: list[list[TokenId]] | None = None
    vectors: list[Vector] | None = Field(
        None,
        description="Each is a list of numbers, or their little-endian float32 bytes in base64, which is faster.",
    )
    k: Positive = 5
    filters: Filters = Field(
        default_factory=dict,
        description="Column of the documents' metadata → the required value, or a list of accepted values.",
    )
    retrieval: Retrieval = "dense"
    datastore: str = SEARCHED_DATASTORE
    text: bool = Field(
        True,
        description="If false, hits have only id, score and distance: the other fields take most of a search's time.",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> "SearchRequest":
        given = [name for name in ("texts", "tokens", "vectors") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of texts, tokens and vectors; found: {', '.join(given) or 'none'}")
        return self


class SearchResponse(BaseModel):
    """Hits of each query, nearest first."""

    results: list[list[Hit]]
    partial: bool = Field(False, description="True if a part of the index did not answer.")
    missing: list[str] = Field(default_factory=list, description="Parts of the index that did not answer.")


class NeighborsRequest(Request):
    """A text to cut into chunks; each chunk is a query, as in training."""

    model_config = example(text="with open(path) as file:\n    return file.read()\n", k=2)

    text: SearchedText
    k: Positive = 2
    filters: Filters = Field(default_factory=dict)
    retrieval: Retrieval = "dense"
    datastore: str = SEARCHED_DATASTORE


class TraceRequest(Request):
    """A text whose verbatim runs are searched in the training documents."""

    model_config = example(text="with open(path) as file:\n    return file.read()\n")

    text: SearchedText
    least: Positive = Field(SHORTEST_RUN, description="Tokens of the shortest run.")
    documents: Positive = Field(3, description="Documents that are named for each run.")


class TraceResponse(BaseModel):
    """Runs in the order of the text, those without a word last. One stands for equal ones, and for those that overlap
    it by half."""

    text: str = Field(description="Text of all tokens: that of the request, as the tokenizer normalizes it.")
    runs: list[TracedRun]
    tokens: int = Field(description="Tokens of the text.")
    tokens_in_runs: int = Field(description="Tokens of the text that are in a run, or in one that a run stands for.")
    datastores: list[str] = Field(
        description="Names of the datastores that were searched: those with the stage `suffixes`."
    )


class Span(BaseModel):
    """A run of tokens that a chunk shares with a neighbor, as character ranges [start, stop) in both texts.

    `neighbor` is a range in `text + continuation` of the hit.
    """

    chunk: tuple[int, int]
    neighbor: tuple[int, int]
    tokens: int


@dataclass(frozen=True)
class NeighborHit(Hit):
    """A neighbor of a chunk and the token runs that both share: at least 3 tokens, longest first."""

    overlap: Annotated[
        float,
        Field(
            description="Length of the longest common token run divided by the chunk's length: r in section 2.7 of the paper."
        ),
    ]
    spans: list[Span]


class Chunk(BaseModel):
    """One chunk of the request's text."""

    text: str
    tokens: int
    neighbors: list[NeighborHit]


class NeighborsResponse(BaseModel):
    """The chunks of a text in order."""

    chunks: list[Chunk]
    partial: bool = False
    missing: list[str] = Field(default_factory=list)


class NeighborTokensRequest(Request):
    """Whole chunks as token ids, for a model that runs outside this server."""

    model_config = example(chunks=[], k=2)

    chunks: list[list[TokenId]] = Field(description="Each has `chunk_length` token ids; see `GET /datastore`.")
    k: Positive = 2


class NeighborTokensResponse(BaseModel):
    """The neighbors of each chunk with their continuations, best first: k rows of 2 · chunk_length token ids."""

    tokens: list[list[list[int]]]
    lengths: list[list[int]] = Field(description="Number of ids that are not padding; 0 = no neighbor.")
    partial: bool = False
    missing: list[str] = Field(default_factory=list)


class EmbedRequest(Request):
    """Texts of any length."""

    model_config = example(texts=["how do I open a file"])

    texts: list[SearchedText]
    encoding: Literal["float", "base64"] = "float"


class EmbedResponse(BaseModel):
    """A unit vector for each text in the requested encoding: numbers, or their little-endian float32 bytes in
    base64."""

    vectors: list[Vector]


class DatastoreResponse(BaseModel):
    """Totals of the datastores, measurements of the index, the checkpoint if there is one, and the server's limits."""

    datastores: list[dict[str, Any]] = Field(
        description="Fields of each: `name`, `fingerprint`, `documents`, `chunks`, `tokens`, `bytes`, `index`, `recall`."
    )
    chunk_length: int
    vocab_size: int
    tokenizer: str = Field(description="Fingerprint of the tokenizer: equal ones have the same token ids.")
    embedder: str | None = Field(description="Null if a datastore has no finished index.")
    dimension: int | None
    filters: list[str] = Field(description="Metadata columns that `filters` accepts.")
    retrieval: list[Retrieval] = Field(description="Kinds of retrieval that a search accepts.")
    trace: bool = Field(description="Whether runs can be traced: a datastore has the stage `suffixes`.")
    model: dict[str, Any] | None = Field(
        description="Fields: `name`, `fingerprint`, `step`, `parameters`, `context`, `retrieval`, `chat` (it has a chat template). Null without a model."
    )
    limits: dict[str, int | float]


class Example(BaseModel):
    """The beginning of a document."""

    document_id: str
    title: str
    text: str
    prompt: str = Field(
        description="The beginning of the text. If the gain was measured, up to a token that is the likeliest one only with retrieval."
    )
    gain: float | None = Field(
        None,
        description="Share of the text's bits that retrieval saves (k = 2). Null without a model that retrieves, or if not measured yet.",
    )


class ExamplesResponse(BaseModel):
    """Passages to try. If no documents are held out, they are from the datastore itself, and a search finds them."""

    held_out: bool
    examples: list[Example]


class FilterValuesResponse(BaseModel):
    """Values of a column. `complete` is false if there are more, or if only the first documents were read."""

    values: list[Value]
    complete: bool


# ------------------------------------------------------------------------------------------------------------ model


def absent_if_none() -> Any:
    """Return a field that is None unless there is a value to return; answers do not contain it then."""
    return Field(default=None, exclude_if=lambda value: value is None)


COPY_STRENGTH = "Factor of the odds of copying from neighbors and datastore; 0 = copy nothing from them."
RETURN_SOURCES = (
    "Return the neighbors that the model read, the runs that it copied from them, and the generated runs that occur "
    "verbatim in the datastore."
)


class ScoreRequest(Request):
    """A text to score token by token, with retrieval ON (k neighbors) and OFF."""

    model_config = example(text="import os\nimport sys\n", k=2)

    text: str = Field(min_length=1)
    k: Positive = 2
    return_sources: bool = Field(False, description=RETURN_SOURCES)


class TokenScore(BaseModel):
    """A token and its log-probabilities in nats. `difference` = on − off: above 0, retrieval helped.

    Tokens that are parts of one character are one entry with the sum of their log-probabilities.
    """

    text: str
    on: float | None
    off: float
    difference: float | None
    chunk: int = Field(description="Number of its chunk, from 0. The model reads the neighbors of the chunk before it.")


class ScoreResponse(BaseModel):
    """Scores of the tokens in order. The concatenated token texts are the scored text."""

    tokens: list[TokenScore]
    bits_per_byte_on: float | None
    bits_per_byte_off: float
    sources: Sources | None = absent_if_none()


class GenerateRequest(Request):
    """A prompt to continue. With `stream`, the answer is a stream of server-sent events with one `GenerateEvent`
    each."""

    model_config = example(prompt="import os\n", max_tokens=16, temperature=0, stream=False)

    prompt: str
    retrieval: bool = True
    k: Positive = 2
    max_tokens: Positive = 128
    temperature: float = bounded("temperature", 0.8, "Below 0.001, the likeliest token is chosen.")
    top_k: Annotated[int, Field(ge=0, lt=2**31), INTEGER] = Field(
        50, description="Sample from the k likeliest tokens; 0 = all."
    )
    top_p: float = Field(0.95, gt=0, le=1)
    copy_strength: float = bounded("copy_strength", 1, COPY_STRENGTH)
    seed: Seed = 0
    stop: list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]] = Field(
        default_factory=list, max_length=MOST_STOPS
    )
    stream: bool = False
    return_sources: bool = Field(False, description=RETURN_SOURCES)


class GenerateResponse(BaseModel):
    """The continuation without the prompt. `finish_reason` is `stop` (end of document or a stop string) or `length`."""

    text: str
    tokens: int
    finish_reason: Literal["stop", "length"]
    sources: Sources | None = absent_if_none()


class GenerateEvent(BaseModel):
    """New text of the continuation; the last event has a `finish_reason`."""

    text: str
    finish_reason: Literal["stop", "length"] | None = None
    sources: Sources | None = absent_if_none()


class ErrorResponse(BaseModel):
    """An error with a message for people and a type for programs."""

    model_config = example(
        error={"message": "k = 1000: at most 100.", "type": "invalid_request_error", "param": "k", "code": None}
    )

    error: dict[str, Any] = Field(description="Fields: `message`, `type`, `param`, `code`, as in OpenAI's API.")


class Status(BaseModel):
    """State of the server: `ok` or `ready`; how many large files, used here for the first time, are still compared with
    their checksums."""

    status: str
    files_to_compare: int | None = None
