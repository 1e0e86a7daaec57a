"""Requests and answers of OpenAI's completions, embeddings and models under /v1, and of the tokenizer endpoints.

Fields that OpenAI's API has and this server does not support are included with the single accepted value: other values are
errors and are never ignored.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from retro.server.schemas import Request, Seed, TokenId

Prompt = str | list[str] | list[TokenId] | list[list[TokenId]]
"""One or several prompts, each a text or a list of token ids."""


class StreamOptions(Request):
    """Options of a stream. With `include_usage`, its last event has the numbers of tokens."""

    include_usage: bool = False


class CompletionRequest(Request):
    """OpenAI's request with two additional fields, `k` and `top_k`. Model `NAME` has retrieval ON, `NAME:off` has it OFF."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "retro", "prompt": "import os\n", "max_tokens": 16, "temperature": 0}]
        }
    )

    model: str
    prompt: Prompt
    max_tokens: int | None = Field(16, ge=0)
    temperature: float | None = Field(1, ge=0, le=100)
    top_p: float | None = Field(1, gt=0, le=1)
    seed: Seed | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=5)
    k: int = Field(2, ge=1, description="Neighbors of each chunk; used if retrieval is ON.")
    top_k: int = Field(0, ge=0, lt=2**31, description="Sample from the k likeliest tokens; 0 = all.")
    user: str | None = None
    n: int | None = Field(1, description="Only 1.")
    best_of: int | None = Field(1, description="Only 1.")
    suffix: str | None = Field(None, description="Only null.")
    presence_penalty: float | None = Field(0, description="Only 0.")
    frequency_penalty: float | None = Field(0, description="Only 0.")
    logit_bias: dict[str, float] | None = Field(None, description="Only null.")


class Logprobs(BaseModel):
    """One entry for each token. The concatenated token texts are the choice's text.

    A token that is a part of a character has an empty text; the last part has the character.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """The continuation of one prompt. With `echo`, the text begins with the prompt."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int


class CompletionResponse(BaseModel):
    """An answer, or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None


class EmbeddingRequest(Request):
    """OpenAI's request. The model is `NAME:embedder`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "retro:embedder", "input": ["how do I open a file"]}]}
    )

    model: str
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(None, description="Only null or the embedder's dimension.")
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
    """All models."""

    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeRequest(Request):
    """A text to tokenize. The name of a special token is converted to its id."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "import os\n"}]})

    prompt: str
    add_special_tokens: bool = Field(False, description="If true, the beginning-of-document id comes first.")
    model: str | None = None


class TokenizeResponse(BaseModel):
    """Token ids of a text."""

    tokens: list[int]
    count: int
    max_model_len: int | None = Field(description="Context length in tokens; null without a model.")


class DetokenizeRequest(Request):
    """Token ids to convert to text."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [5, 6, 7]}]})

    tokens: list[TokenId]
    model: str | None = None


class DetokenizeResponse(BaseModel):
    """The text of token ids."""

    prompt: str


class TokenizerInfo(BaseModel):
    """Names of the special tokens, as `POST /tokenize` accepts them, and the size of the vocabulary."""

    bos_token: str
    eos_token: str
    pad_token: str
    vocab_size: int
