"""The retrievers for LangChain and LlamaIndex in the documentation return the server's hits.

The packages are large and not required: without them, the few classes that the retrievers use are replaced by stand-ins.
"""

import configparser
import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

from retro.server.settings import ServeSettings
from tests.conftest import PATIENCE
from tests.retro.server.conftest import TEXT

PAGES = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "serving"
CLIENTS, DEPLOY = PAGES / "clients.md", PAGES / "deploy.md"


class Record:
    """Keeps its arguments as attributes."""

    def __init__(self, page_content: str = "", **fields: Any) -> None:
        self.__dict__.update(fields, page_content=page_content)


class LangChainRetriever(Record):
    def invoke(self, query: str) -> list[Any]:
        return self._get_relevant_documents(query, run_manager=None)


class LlamaIndexRetriever:
    def retrieve(self, query: str) -> list[Any]:
        return self._retrieve(SimpleNamespace(query_str=query))


STAND_INS = {
    "langchain_core": {
        "langchain_core.documents": {"Document": Record},
        "langchain_core.retrievers": {"BaseRetriever": LangChainRetriever},
    },
    "llama_index": {
        "llama_index.core": {},
        "llama_index.core.retrievers": {"BaseRetriever": LlamaIndexRetriever},
        "llama_index.core.schema": {"NodeWithScore": Record, "TextNode": Record},
    },
}


def documented(package: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The retriever's class of the page's code."""
    if importlib.util.find_spec(package) is None:
        for name, members in {package: {}, **STAND_INS[package]}.items():
            module = ModuleType(name)
            module.__dict__.update(members)
            monkeypatch.setitem(sys.modules, name, module)
    blocks = re.findall(r"^```python\n(.*?)^```$", CLIENTS.read_text(), flags=re.DOTALL | re.MULTILINE)
    (code,) = [block for block in blocks if package in block]
    defined: dict[str, Any] = {}
    exec(compile(code, str(CLIENTS), "exec", dont_inherit=True), defined)
    return defined["RetroRetriever"]


@pytest.mark.parametrize(("package", "search"), [("langchain_core", "invoke"), ("llama_index", "retrieve")])
def test_a_documented_retriever_returns_the_servers_hits(
    url: str, package: str, search: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"texts": [TEXT], "k": 3, "retrieval": "hybrid"}
    hits = httpx.post(url + "/search", json=body, timeout=PATIENCE).json()["results"][0]
    found = getattr(documented(package, monkeypatch)(url=url, k=3), search)(TEXT)
    if package == "langchain_core":
        rows = [(each.page_content, each.metadata) for each in found]
        expected = [hit["metadata"] | {"score": hit["score"]} for hit in hits]
    else:
        rows, expected = [(each.node.text, each.node.metadata) for each in found], [hit["metadata"] for hit in hits]
        assert [each.score for each in found] == [hit["score"] for hit in hits]
    assert rows == [(hit["text"] + hit["continuation"], row) for hit, row in zip(hits, expected, strict=True)]


def test_the_unit_of_systemd_gives_the_server_time_to_stop_and_names_its_options() -> None:
    found = re.search(r"^```ini\n(.*?)^```$", DEPLOY.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert found is not None
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[method-assign, assignment]
    unit.read_string(found[1])
    assert float(unit["Service"]["TimeoutStopSec"]) > ServeSettings().shutdown_seconds
    _, verb, _, *options = shlex.split(unit["Service"]["ExecStart"])
    assert verb == "serve"
    known = set(ServeSettings.__dataclass_fields__) | {"checkpoint"}
    assert {each[2:].replace("-", "_") for each in options if each.startswith("--")} <= known
