"""Without a token the server rejects host names that another web site could point at it."""

import pytest
from starlette.testclient import TestClient

from tests.retro.server.conftest import Make


def status(client: TestClient, host: str, path: str = "/datastore") -> int:
    return client.get(path, headers={"Host": host}).status_code


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example"]
)
def test_foreign_host_names_are_rejected(client: TestClient, host: str) -> None:
    answer = client.get("/datastore", headers={"Host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
    assert "--allowed-hosts" in answer.json()["error"]["message"]
    assert status(client, host, "/metrics") == 403
    assert status(client, host, "/health") == 200  # which reveals nothing


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8080", "127.0.0.1:8080", "10.1.2.3", "[::1]:8080", "localhost.", ""]
)
def test_local_names_and_ip_addresses_are_accepted(client: TestClient, host: str) -> None:
    assert status(client, host) == 200


def test_allowed_hosts_adds_names_and_a_star_accepts_any(app_with: Make) -> None:
    with TestClient(app_with(allowed_hosts=("Search.internal",))) as client:
        assert status(client, "search.internal:80") == 200
        assert status(client, "other.internal") == 403
    with TestClient(app_with(allowed_hosts=("*",))) as client:
        assert status(client, "evil.example") == 200


def test_a_valid_token_accepts_any_host_name(app_with: Make) -> None:
    """Pages of other sites do not have the token."""
    with TestClient(app_with(token="right"), headers={"Authorization": "Bearer right"}) as client:
        assert status(client, "search.internal") == 200
