"""The web page's files need no token, all other routes do; apps in one process are independent."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from retro.server import app as app_module
from tests.retro.server.conftest import TEXT, Make


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "index.html").write_text("<script src='page.js'></script>")
    (folder / "page.js").write_text("ask()")
    monkeypatch.setattr(app_module, "PAGE", folder)
    return folder


def test_page_files_need_no_token_and_other_routes_do(page: Path, app_with: Make) -> None:
    with TestClient(app_with(token="right")) as client:
        assert client.get("/").text == (page / "index.html").read_text()
        assert client.get("/page.js").text == "ask()"
        assert client.get("/").headers["Content-Security-Policy"].startswith("default-src 'self'")
        assert client.get("/docs").status_code == 200
        paths = ["/metrics", "/datastore", "/v1/models", "/none.js", "/../settings.py"]
        for path in paths:
            assert client.get(path).status_code == 401, path
        assert client.get("/none.js", headers={"Authorization": "Bearer right"}).status_code == 404


def test_page_and_metrics_are_served_under_full_load(page: Path, app_with: Make) -> None:
    app = app_with(max_requests=1)
    app.state.service.admission.under_way = 1
    with TestClient(app) as client:
        assert client.get("/").status_code == 200
        assert client.get("/metrics").status_code == 200
        assert client.post("/search", json={"texts": [TEXT]}).status_code == 429


def test_two_apps_in_a_process_have_separate_metrics(app_with: Make) -> None:
    with TestClient(app_with()) as one, TestClient(app_with()) as other:
        one.post("/search", json={"texts": [TEXT]})
        assert 'path="/search"' in one.get("/metrics").text
        assert 'path="/search"' not in other.get("/metrics").text


def test_unknown_paths_share_one_metrics_label(app_with: Make) -> None:
    with TestClient(app_with()) as client:
        for number in range(5):
            client.get(f"/nothing-{number}")
        assert 'retro_requests_total{method="GET",path="other",status="404"} 5.0' in client.get("/metrics").text


def test_an_app_can_be_restarted(app_with: Make) -> None:
    app = app_with()
    for _ in range(2):
        with TestClient(app) as client:
            assert client.post("/search", json={"texts": [TEXT]}).status_code == 200
