"""A server whose decoder reads neighbors keeps them between requests, and its metrics count hits and misses."""

import re
from dataclasses import replace

from starlette.testclient import TestClient

from indexing.retrieval.retriever import Retriever
from retro.inference.language_model import LanguageModel
from retro.inference.neighbor_cache import NeighborCache
from retro.model.retro import Retro
from retro.model_settings import updated
from retro.server.app import make_app
from retro.server.settings import ServeSettings
from tests.retro.server.conftest import TEXT


def test_neighbors_are_encoded_once_for_all_requests(language_model: LanguageModel, retriever: Retriever) -> None:
    reads = {"retrieval.reader": "decoder", "retrieval.cca_layers": ()}
    model = Retro(updated(language_model.model.settings, reads)).eval()
    reading = replace(language_model, model=model, neighbor_cache=NeighborCache(model, 2**24), _searches={})
    app = make_app(retriever, reading, ServeSettings(name="tiny", allowed_hosts=("testserver",)))
    with TestClient(app) as client:

        def counts() -> list[float]:
            return [
                float(found)
                for found in re.findall(r"^retro_neighbors_read.* (\S+)$", client.get("/metrics").text, re.M)
            ]

        scores = [client.post("/score", json={"text": TEXT * 5, "k": 2}).json() for _ in range(2)]
        assert scores[0] == scores[1]
        hits, misses = counts()
        assert hits >= misses > 0
        answer = client.post("/generate", json={"prompt": TEXT, "k": 2, "max_tokens": 3, "temperature": 0})
        assert answer.status_code == 200, answer.text
        assert counts()[0] > hits
        assert counts()[1] >= misses
