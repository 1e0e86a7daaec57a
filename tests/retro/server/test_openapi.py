"""The OpenAPI description is accurate: neither valid nor invalid requests make the server fail."""

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from starlette.testclient import TestClient

from tests.retro.server.conftest import Make

load_all_checks()
WANTED = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
]


@pytest.fixture(scope="module")
def app(app_with: Make) -> FastAPI:
    return app_with(max_tokens=8, max_input_tokens=200)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_endpoint_matches_its_description(app: FastAPI, mode: GenerationMode) -> None:
    """Valid requests (`positive`) succeed and invalid ones (`negative`) are rejected."""
    checks = CHECKS.get_by_names(WANTED)
    asked = 0
    for found in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations():
        operation = found.ok()

        @settings(
            max_examples=20,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def matches_description(case: schemathesis.Case) -> None:
            nonlocal asked
            asked += 1
            case.call_and_validate(checks=checks)

        try:
            matches_description()
        except Unsatisfiable:
            assert mode.is_negative  # no request is invalid: without a body, and any text is a valid path
    assert asked > 200


def test_every_request_example_works(app: FastAPI) -> None:
    described = app.openapi()
    with TestClient(app) as client:
        for path, methods in described["paths"].items():
            for method, operation in methods.items():
                assert operation["description"], path
                if method != "post":
                    continue
                reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                examples = described["components"]["schemas"][reference.rpartition("/")[2]]["examples"]
                for example in examples:
                    name = {"retro": "tiny", "retro:embedder": "tiny:embedder"}
                    body = {key: name.get(str(value), value) for key, value in example.items()}
                    body |= {name: 4 for name in ("max_tokens", "max_completion_tokens") if name in body}
                    response = client.post(path, json=body)
                    assert response.status_code == 200, (path, response.text)


def test_the_docs_page_loads_nothing_external(app: FastAPI) -> None:
    with TestClient(app) as client:
        page = client.get("/docs")
    for path in app.openapi()["paths"]:
        assert path in page.text
    assert "curl" in page.text
    assert "<script" not in page.text
    assert page.headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'sha256-")
