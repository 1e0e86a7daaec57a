"""The web page's files need no token, all other routes do; apps in one process are independent."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from retro.server import app as app_module
from tests.retro.server.conftest import TEXT, Make

SEARCH = {"texts": [TEXT]}


def test_page_files_need_no_token_and_other_routes_do(
    app_with: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index.html").write_text("<script src='page.js'></script>")
    (tmp_path / "page.js").write_text("ask()")
    monkeypatch.setattr(app_module, "PAGE", tmp_path)
    with TestClient(app_with(token="right")) as client:
        assert client.get("/").text == (tmp_path / "index.html").read_text()
        assert client.get("/page.js").text == "ask()"
        for path in ("/metrics", "/datastore", "/v1/models", "/none.js", "/../settings.py", "/page.js/", "/PAGE.JS"):
            assert client.get(path).status_code == 401, path
        assert client.get("/none.js", headers={"Authorization": "Bearer right"}).status_code == 404


def test_page_and_metrics_are_served_under_full_load(app_with: Make) -> None:
    app = app_with(max_requests=1)
    app.state.service.admission.under_way = 1
    with TestClient(app) as client:
        assert client.get("/").status_code == client.get("/metrics").status_code == 200
        assert client.post("/search", json=SEARCH).status_code == 429


def test_apps_in_a_process_have_separate_metrics_and_can_be_restarted(app_with: Make) -> None:
    app = app_with()
    with TestClient(app) as one, TestClient(app_with()) as other:
        one.post("/search", json=SEARCH)
        for number in range(5):
            one.get(f"/nothing-{number}")
        assert 'retro_requests_total{method="POST",path="/search",status="200"} 1.0' in one.get("/metrics").text
        assert 'retro_requests_total{method="GET",path="other",status="404"} 5.0' in one.get("/metrics").text
        assert 'path="/search"' not in other.get("/metrics").text
    with TestClient(app) as client:
        assert client.post("/search", json=SEARCH).status_code == 200
