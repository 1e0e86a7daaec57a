"""Requests and answers of OpenAI's chat under /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from retro.server.openai.schemas import LenientRequest, SamplingRequest, Usage, example
from retro.server.schemas import INTEGER, Positive, Sources, absent_if_none


class ContentPart(LenientRequest):
    """A part of a message. Only the type `text` is supported."""

    type: str
    text: str | None = None


class ChatMessage(LenientRequest):
    """A message; `developer` is another name for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]


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
    tools: list[Any] | None = Field(None, max_length=0, description="Only null or [].")
    tool_choice: Literal["none", "auto"] | None = None
    functions: list[Any] | None = Field(None, max_length=0, description="Only null or [].")
    response_format: dict[str, Any] | None = Field(None, description='Only null or {"type": "text"}.')
    modalities: list[Literal["text"]] | None = None


class TopLogprob(BaseModel):
    """A token and its log-probability. `bytes` is its text in UTF-8, null for special tokens and parts of characters."""

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
    """The assistant's answer."""

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


class ChatResponse(BaseModel):
    """A complete answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None


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


class ChatChunk(BaseModel):
    """An event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
