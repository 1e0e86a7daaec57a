"""OpenAI's embeddings under /v1, and the tokenizer endpoints that lm-eval uses."""

from typing import Annotated

from fastapi import APIRouter

from retro.server.errors import InvalidRequest, error_responses
from retro.server.openai import schemas
from retro.server.openai.completions import special_names, usage_of
from retro.server.openai.requests import check_embedder, lenient, token_rows
from retro.server.routes import JsonRoute, ServiceDependency
from retro.server.search_api import encoded

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])
tokenizer_router = APIRouter(route_class=JsonRoute, tags=["tokenizer"])


@router.post("/v1/embeddings", responses=error_responses(400, 404, 413))
async def embeddings(
    request: Annotated[schemas.EmbeddingRequest, lenient(schemas.EmbeddingRequest)], service: ServiceDependency
) -> schemas.EmbeddingResponse:
    """Embed texts or token ids; returns unit vectors."""
    check_embedder(service, request.model)
    dimension = service.retriever.embedder.dimension
    if request.dimensions not in (None, dimension):
        raise InvalidRequest(f"dimensions = {request.dimensions}: the embedder has {dimension}.", param="dimensions")
    rows = await token_rows(service, request.input, "input")
    vectors = await service.embed("tokens", rows)
    data = [
        schemas.Embedding.model_construct(index=index, embedding=encoded(vector, request.encoding_format))
        for index, vector in enumerate(vectors)
    ]
    return schemas.EmbeddingResponse.model_construct(data=data, model=request.model, usage=usage_of(rows))


# --- tokenizer -------------------------------------------------------------------------------------------------------


@tokenizer_router.get("/tokenizer_info", responses=error_responses())
def tokenizer_info(service: ServiceDependency) -> schemas.TokenizerInfo:
    """Return the names of the special tokens and the size of the vocabulary."""
    tokenizer = service.retriever.tokenizer
    names = special_names(tokenizer)
    return schemas.TokenizerInfo(
        bos_token=names[tokenizer.bos_id],
        eos_token=names[tokenizer.eos_id],
        pad_token=names[tokenizer.pad_id],
        vocab_size=tokenizer.vocab_size,
    )


@tokenizer_router.post("/tokenize", responses=error_responses(413, 422))
async def tokenize(
    request: Annotated[schemas.TokenizeRequest, lenient(schemas.TokenizeRequest)], service: ServiceDependency
) -> schemas.TokenizeResponse:
    """Convert a text to token ids. The name of a special token is converted to its id."""
    tokenizer = service.retriever.tokenizer
    special = {name: token for token, name in special_names(tokenizer).items()}
    if request.prompt in special:
        tokens = [special[request.prompt]]
    else:
        tokens = (await service.encoded([request.prompt], "prompt"))[0].tolist()
    if request.add_special_tokens:
        tokens = [tokenizer.bos_id, *tokens]
    context = service.language_model.context if service.language_model else None
    return schemas.TokenizeResponse(tokens=tokens, count=len(tokens), max_model_len=context)


@tokenizer_router.post("/detokenize", responses=error_responses(413, 422))
async def detokenize(
    request: Annotated[schemas.DetokenizeRequest, lenient(schemas.DetokenizeRequest)], service: ServiceDependency
) -> schemas.DetokenizeResponse:
    """Convert token ids to text."""
    rows = await token_rows(service, [request.tokens], "tokens")
    return schemas.DetokenizeResponse(prompt=service.retriever.tokenizer.decode(rows[0]))
