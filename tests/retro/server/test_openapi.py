"""The OpenAPI description is accurate: neither valid nor invalid requests make the server fail."""

import json
import re
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from jsonschema import Draft202012Validator
from starlette.testclient import TestClient

from tests.retro.server.conftest import Make

WANTED = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
]


SMALL = {"max_tokens": 8, "max_input_tokens": 200}


@pytest.fixture(scope="module")
def app(app_with: Make) -> FastAPI:
    return app_with(**SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_every_endpoint_matches_its_description(app_with: Make, mode: str) -> None:
    """Valid requests (`positive`) succeed and invalid ones (`negative`) are rejected."""
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import CHECKS, load_all_checks

    load_all_checks()
    app, checks, asked = (
        app_with(**SMALL),
        CHECKS.get_by_names(WANTED),
        0,
    )  # an app of its own: it runs in other event loops
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
        @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
        def matches_description(case: schemathesis.Case) -> None:
            nonlocal asked
            asked += 1
            case.call_and_validate(checks=checks)

        try:
            matches_description()
        except Unsatisfiable:
            assert mode == "negative"  # no request is invalid: without a body, and any text is a valid path
    assert asked > 200


def test_every_reference_exists_and_every_request_example_works(app: FastAPI) -> None:
    described = app.openapi()
    assert set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(described))) <= set(
        described["components"]["schemas"]
    )
    with TestClient(app) as client:
        for path, methods in described["paths"].items():
            for method, operation in methods.items():
                assert operation["description"], path
                assert len(operation["tags"]) == 1, path  # Swagger UI lists an endpoint once for each tag
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


@pytest.mark.parametrize(
    ("path", "event", "body"),
    [
        ("/generate", "GenerateEvent", {"prompt": "a"}),
        ("/v1/completions", "CompletionResponse", {"model": "tiny", "prompt": "a"}),
        ("/v1/chat/completions", "ChatChunk", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_the_events_of_a_stream_match_their_description(
    app: FastAPI, path: str, event: str, body: dict[str, Any]
) -> None:
    described = app.openapi()
    content = described["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    data = content["itemSchema"]["properties"]["data"]
    assert data["contentMediaType"] == "application/json"
    kinds = [each["$ref"].rpartition("/")[2] for each in data["contentSchema"]["anyOf"]]
    assert kinds == [event, "ErrorResponse"]
    validator = Draft202012Validator({"$ref": f"#/components/schemas/{event}", "components": described["components"]})
    limit = "max_completion_tokens" if "chat" in path else "max_tokens"
    with TestClient(app) as client:
        lines = client.post(path, json=body | {"stream": True, "return_sources": True, limit: 4}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert len(events) > 1
    for each in events:
        validator.validate(each)


@pytest.mark.parametrize(
    ("path", "body", "integers"),
    [
        ("/search", {"text": False}, {"tokens": [[5, 6]], "k": 2}),
        ("/generate", {"prompt": "a"}, {"k": 2, "max_tokens": 2, "top_k": 5, "seed": 13184}),
        ("/v1/embeddings", {"model": "tiny:embedder"}, {"input": [5, 6]}),
        ("/detokenize", {}, {"tokens": [5, 6]}),
        (
            "/v1/completions",
            {"model": "tiny", "temperature": 0, "logit_bias": {"60": 3.0}},
            {"prompt": [[5, 6]], "max_tokens": 2, "n": 1, "best_of": 1, "logprobs": 2, "seed": 1, "k": 1, "top_k": -1, "stop_token_ids": [7]},
        ),
        (
            "/v1/chat/completions",
            {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "logprobs": True, "temperature": 0},
            {"max_completion_tokens": 2, "top_logprobs": 2},
        ),
    ],
)  # fmt: skip
def test_an_integer_can_be_written_with_a_zero_after_the_point(
    app: FastAPI, path: str, body: dict[str, Any], integers: dict[str, Any]
) -> None:
    """JSON Schema's `integer` includes 2.0. Fractions, texts and truth values are errors as before."""

    def with_points(value: Any) -> Any:
        return [with_points(each) for each in value] if isinstance(value, list) else float(value)

    def answer(own: dict[str, Any]) -> Any:
        response = client.post(path, json=body | own)
        assert response.status_code == 200, response.text
        return {name: value for name, value in response.json().items() if name not in ("id", "created")}

    with TestClient(app) as client:
        assert answer(integers) == answer({name: with_points(value) for name, value in integers.items()})
        for name, value in integers.items():
            for wrong in (1.5, "1", True, 1e300):
                sent = [wrong] if isinstance(value, list) else wrong
                if (path, name, wrong) not in {("/v1/embeddings", "input", "1"), ("/v1/completions", "prompt", "1")}:
                    assert client.post(path, json=body | integers | {name: sent}).status_code in (400, 422), (
                        name,
                        wrong,
                    )


def test_the_docs_page_loads_nothing_external_and_needs_no_token(app_with: Make) -> None:
    with TestClient(app_with(token="right")) as client:
        page = client.get("/docs")
        loaded = re.findall(r"(?:src|href)=\"([^\"]+)\"", page.text)
        assert len(loaded) == 3
        for path in [*loaded, "openapi.json"]:
            assert client.get(f"/{path}").status_code == 200
        assert client.get("/datastore").status_code == 401
        assert "bearer" in json.dumps(client.get("/openapi.json").json()["components"]["securitySchemes"])
    scripts = page.headers["Content-Security-Policy"].split("script-src ")[1].partition(";")[0].split()
    assert len(scripts) == 2
    assert scripts[0] == "'self'"
    assert scripts[1].startswith("'sha256-")
