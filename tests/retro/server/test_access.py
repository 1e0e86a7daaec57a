"""Without a token the server answers no name that a web page of another site can let point to it."""

import pytest
from starlette.testclient import TestClient

from tests.retro.server.conftest import Make


def status(client: TestClient, host: str, path: str = "/datastore") -> int:
    return client.get(path, headers={"Host": host}).status_code


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example"]
)
def test_a_name_of_another_site_is_refused(client: TestClient, host: str) -> None:
    answer = client.get("/datastore", headers={"Host": host})
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "forbidden")
    assert "--allowed-hosts" in answer.json()["error"]["message"]
    assert status(client, host, "/metrics") == 403
    assert status(client, host, "/health") == 200  # which tells nothing


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8080", "127.0.0.1:8080", "10.1.2.3", "[::1]:8080", "localhost.", ""]
)
def test_names_that_no_page_can_have_are_accepted(client: TestClient, host: str) -> None:
    assert status(client, host) == 200


def test_further_names_and_any(app_with: Make) -> None:
    with TestClient(app_with(allowed_hosts=("Search.internal",))) as client:
        assert status(client, "search.internal:80") == 200
        assert status(client, "other.internal") == 403
    with TestClient(app_with(allowed_hosts=("*",))) as client:
        assert status(client, "evil.example") == 200


def test_a_token_is_enough(app_with: Make) -> None:
    """No page of another site has it."""
    with TestClient(app_with(token="right"), headers={"Authorization": "Bearer right"}) as client:
        assert status(client, "search.internal") == 200
