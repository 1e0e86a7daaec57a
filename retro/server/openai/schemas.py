"""Requests and answers of OpenAI's completions, chat, embeddings and models under /v1, and of the tokenizer endpoints.

Fields of OpenAI's API that change answers and are not supported are included with the accepted value: other values are
errors. Fields that are not listed are ignored, and the answer's header `Warning` names them
(`ServeSettings.strict_fields`).
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from indexing.retrieval.results import PASSAGE_TOKENS, PASSAGES
from indexing.store.settings import Fraction
from retro.inference.quotes import Grounding
from retro.inference.source_texts import Sources
from retro.server.schemas import (
    COPY_STRENGTH,
    INTEGER,
    LONGEST_STOP,
    MOST_STOPS,
    RETURN_SOURCES,
    Integer,
    Natural,
    Positive,
    Request,
    Seed,
    TokenId,
    absent_if_none,
    bounded,
    example,
)

Prompt = str | list[str] | list[TokenId] | list[list[TokenId]]
"""One or several prompts, each a text or a list of token ids."""


def _within_limits(stop: str | list[str] | None) -> str | list[str] | None:
    texts = [stop] if isinstance(stop, str) else stop or []
    if len(texts) > MOST_STOPS:
        raise ValueError(f"{len(texts):,} texts; at most {MOST_STOPS}.")
    if (longest := max(map(len, texts), default=0)) > LONGEST_STOP:
        raise ValueError(f"a text of {longest:,} characters; at most {LONGEST_STOP:,}.")
    return stop


_StopText = Annotated[str, Field(json_schema_extra={"maxLength": LONGEST_STOP})]
Stop = Annotated[
    _StopText | Annotated[list[_StopText], Field(json_schema_extra={"maxItems": MOST_STOPS})] | None,
    AfterValidator(_within_limits),  # pydantic's errors for a union are about its first type
]
"""One or several stop strings."""

Bias = Annotated[float, bounded("logit_bias")]


class LenientRequest(Request):
    """Base of requests under /v1: unknown fields are accepted; see `requests.lenient`."""

    model_config = ConfigDict(extra="allow")


class StreamOptions(LenientRequest):
    """Options of a stream. With `include_usage`, its last event has the numbers of tokens."""

    include_usage: bool = False


class SamplingRequest(LenientRequest):
    """Fields of completions and chat. Model `NAME` has retrieval ON, `NAME:off` has it OFF."""

    model: str
    temperature: float | None = bounded("temperature", 1)
    top_p: float | None = Field(1, gt=0, le=1)
    top_k: Annotated[int, Field(ge=-1, lt=2**31), INTEGER] = Field(
        0, description="Sample from the k likeliest tokens; 0 and -1 = all."
    )
    min_p: float | None = bounded("min_p", 0, "Least probability of a token, relative to the likeliest token's.")
    presence_penalty: float | None = bounded("presence_penalty", 0)
    frequency_penalty: float | None = bounded("frequency_penalty", 0)
    repetition_penalty: float | None = bounded("repetition_penalty", 1)
    copy_strength: float | None = bounded("copy_strength", 1, COPY_STRENGTH)
    logit_bias: dict[str, Bias] | None = Field(
        None, max_length=1024, description="Token id → number that is added to its logit, -100 to 100."
    )
    seed: Seed | None = None
    stop: Stop = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool = Field(False, description="Continue after the end of the document.")
    n: Positive | None = Field(1, description="Number of continuations.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    k: Positive = Field(2, description="Neighbors of each chunk; used if retrieval is ON.")
    return_sources: bool = Field(False, description=RETURN_SOURCES)
    user: str | None = None


class CompletionRequest(SamplingRequest):
    """OpenAI's request and fields of vLLM."""

    model_config = example(model="retro", prompt="import os\n", max_tokens=16, temperature=0)

    prompt: Prompt
    max_tokens: Natural | None = 16
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=5), INTEGER] | None = None
    best_of: Integer | None = Field(None, description="Only null or n.")
    suffix: str | None = Field(None, description="Only null.")


class Logprobs(BaseModel):
    """One entry for each token. The concatenated token texts are the choice's text.

    A token that is a part of a character has an empty text; the last part has the character.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """A continuation; `index` = number of the prompt · n + number of the continuation. With `echo`, it begins with the
    prompt."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    sources: Sources | None = absent_if_none()


class CompletionTokensDetails(BaseModel):
    """Tokens that were proposed from the text and its neighbors, and verified by the model. `completion_tokens` has the
    accepted ones."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails | None = None


class _Response(BaseModel):
    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | None = None
    system_fingerprint: str | None = None


class CompletionResponse(_Response):
    """An answer, or one event of a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


# ------------------------------------------------------------------------------------------------------------- chat


class ContentPart(LenientRequest):
    """A part of a message. Only the type `text` is supported."""

    type: str
    text: str | None = None


ROLES = ("system", "developer", "user", "assistant")


def _supported_role(role: str) -> str:
    if role not in ROLES:
        raise ValueError(f"the role {role!r} is not supported; accepted are {', '.join(ROLES)}.")
    return role


def _only_empty(value: list[Any] | None) -> list[Any] | None:
    if value:
        raise ValueError("not supported: the model calls no functions. Remove it, or send null or [].")
    return value


Unsupported = Annotated[
    list[Any] | None,
    AfterValidator(_only_empty),
    Field(json_schema_extra={"anyOf": [{"type": "array", "items": {}, "maxItems": 0}, {"type": "null"}]}),
]
"""A field that must be empty."""


class ChatMessage(LenientRequest):
    """A message; `developer` is another name for `system`."""

    role: Annotated[str, AfterValidator(_supported_role), Field(json_schema_extra={"enum": list(ROLES)})]
    content: str | list[ContentPart] | None = Field(
        None, description="Text. Null only in an assistant's message with `tool_calls`; it is then empty."
    )
    tool_calls: list[Any] | None = Field(None, description="Of an assistant's message in the history; not written.")


class PassageRequest(LenientRequest):
    """Passages of the datastore in the prompt, searched for the conversation: `hybrid`, or `sparse` without vectors."""

    passages: Positive = Field(PASSAGES, description="Largest number of passages.")
    tokens: Positive = Field(
        PASSAGE_TOKENS,
        description="Largest number of tokens of all passages. Fewer are taken where the context is smaller.",
    )
    least_match: Fraction | None = Field(
        None,
        description="How much of the question the best passage must say, by terms, 0 to 1; if it says less, there are no passages. Null: "
        "0.25, for Chinese 0.13; 0: passages for every question.",
    )
    copies: bool = Field(
        True,
        alias="copy",
        description="Also copy from the passages and from the datastore, if the model does. False = passages in the prompt only.",
    )


class ChatRequest(SamplingRequest):
    """OpenAI's request and fields of vLLM. The model must have a chat template."""

    model_config = example(
        model="retro",
        messages=[{"role": "user", "content": "What is an index?"}],
        max_completion_tokens=16,
        temperature=0,
    )

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Positive | None = Field(None, description="Null = up to the end of the context.")
    max_tokens: Positive | None = Field(None, description="The older name of `max_completion_tokens`.")
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20), INTEGER] | None = Field(
        None, description="Likeliest tokens at each position; needs `logprobs`."
    )
    tools: Unsupported = Field(None, description="Only null or [].")
    tool_choice: Literal["none", "auto"] | None = None
    functions: Unsupported = Field(None, description="Only null or [].")
    response_format: dict[str, Any] | None = Field(None, description='Only null or {"type": "text"}.')
    modalities: list[Literal["text"]] | None = None
    retrieval: PassageRequest | None = Field(
        None, description="Answer from passages. Null = no passages in the prompt."
    )


class TopLogprob(BaseModel):
    """A token and its log-probability. `bytes` is its text in UTF-8, null for special tokens and parts of
    characters."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A generated token and the likeliest ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One entry for each token."""

    content: list[TokenLogprob]


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One of n answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"]
    sources: Sources | None = absent_if_none()
    retrieval: Grounding | None = absent_if_none()


class ChatResponse(_Response):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    """New text of an answer; the first event of an answer has the role."""

    role: Literal["assistant"] | None = None
    content: str = ""


class ChunkChoice(BaseModel):
    """New text of one of n answers; the last one has a `finish_reason`."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    sources: Sources | None = absent_if_none()
    retrieval: Grounding | None = absent_if_none()


class ChatChunk(_Response):
    """An event of a stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]


# ------------------------------------------------------------------------------------------- embeddings and models


class EmbeddingRequest(LenientRequest):
    """OpenAI's request. The model is `NAME:embedder`."""

    model_config = example(model="retro:embedder", input=["how do I open a file"])

    model: str
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Integer | None = Field(None, description="Only null or the embedder's dimension.")
    user: str | None = None


class Embedding(BaseModel):
    """A unit vector as numbers, or as its little-endian float32 bytes in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(BaseModel):
    """Embeddings in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class Model(BaseModel):
    """A model that requests can name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "retro"
    max_model_len: int | None = Field(None, description="Context length in tokens; null for an embedder.")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeRequest(LenientRequest):
    """A text to tokenize. The name of a special token is converted to its id."""

    model_config = example(prompt="import os\n")

    prompt: str
    add_special_tokens: bool = Field(False, description="If true, the beginning-of-document id comes first.")
    model: str | None = None


class TokenizeResponse(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int | None = Field(description="Context length in tokens; null without a model.")


class DetokenizeRequest(LenientRequest):
    """Token ids to convert to text."""

    model_config = example(tokens=[5, 6, 7])

    tokens: list[TokenId]
    model: str | None = None


class DetokenizeResponse(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    """Names of the special tokens, as `POST /tokenize` accepts them, and the size of the vocabulary."""

    bos_token: str
    eos_token: str
    pad_token: str
    vocab_size: int
