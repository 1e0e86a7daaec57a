"""The models that requests under /v1 can name.

NAME ─► retrieval ON      NAME:off ─► the same weights, retrieval OFF      NAME:embedder ─► /v1/embeddings
"""

from collections.abc import Sequence

from fastapi import APIRouter

from retro.server.errors import ApiError, error_responses
from retro.server.openai import schemas
from retro.server.service import Service, ServiceDependency

router = APIRouter(tags=["OpenAI"])

_OFF, _EMBEDDER = ":off", ":embedder"


@router.get("/v1/models", responses=error_responses())
def models(service: ServiceDependency) -> schemas.ModelList:
    """List the models."""
    return schemas.ModelList(data=[_model(service, name) for name in [*_generating(service), _embedder(service)]])


@router.get("/v1/models/{model}", responses=error_responses(404))
def model(model: str, service: ServiceDependency) -> schemas.Model:
    """Return one model."""
    _check(model, [*_generating(service), _embedder(service)])
    return _model(service, model)


def neighbors_of(service: Service, request: schemas.SamplingRequest) -> int:
    """Return the number of neighbors of each chunk that a request's model reads; 0 = retrieval OFF.

    Raises:
        ApiError: no model has this name, it does not generate, or k is too large.
    """
    service.model()
    _check(request.model, _generating(service))
    return service.check_model_k(request.k) if service.retrieves and not request.model.endswith(_OFF) else 0


def check_embedder(service: Service, name: str) -> None:
    """Raise ApiError if this is not the name of the embedder."""
    _check(name, [_embedder(service)])


def _generating(service: Service) -> list[str]:
    names = [service.name] if service.language_model else []
    return [*names, *(name + _OFF for name in names if service.retrieves)]


def _embedder(service: Service) -> str:
    return service.name + _EMBEDDER


def _model(service: Service, name: str) -> schemas.Model:
    context = None if name.endswith(_EMBEDDER) else service.model().context
    return schemas.Model(id=name, created=service.started, max_model_len=context)


def _check(name: str, accepted: Sequence[str]) -> None:
    if name not in accepted:
        message = f"model = {name!r}: accepted are {', '.join(accepted)}."
        raise ApiError(404, message, param="model", code="model_not_found")
