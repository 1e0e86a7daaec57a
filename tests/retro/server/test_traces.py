"""Verbatim runs over HTTP: of a given text, and of a planted passage that a model with the whole datastore continues."""

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore, delete_documents
from indexing.store.files import read_json, write_checked
from indexing.suffixes.search import SHORTEST_RUN, Match, Place, Run, SuffixIndex, trace
from retro.copying.head import CopyHead
from retro.copying.matches import MATCH_LENGTHS
from retro.inference.generation import GeneratedToken
from retro.inference.language_model import LanguageModel
from retro.inference.source_texts import joined
from retro.inference.spans import ChunkTexts
from retro.inference.verbatim_runs import GeneratedRun, GeneratedRuns, TracedDatastore, traced_datastores
from retro.server import schemas, trace_api
from retro.server.app import make_app
from retro.server.service import Service
from retro.server.settings import ServeSettings
from tests.conftest import PATIENCE, build_local, tiny_config, write_corpus
from tests.retro.server.conftest import CHAT_TEMPLATE, events_of
from tests.retro.server.generation_requests import (
    CHAT,
    COMPLETIONS,
    ENDPOINTS,
    GENERATE,
    SOURCES,
    choices_of,
    post,
    refusal,
    with_bos,
)


def text_between(retriever: Retriever, place: dict[str, Any]) -> str:
    """The text between the two ends of a place."""
    (first, start), (last, stop) = place["start"], place["stop"]
    texts = [retriever.lookup.chunk(chunk).text for chunk in range(first, last + 1)]
    return "".join(texts)[start : len("".join(texts[:-1])) + stop]


# --- a given text ----------------------------------------------------------------------------------------------------


def test_a_trace_names_the_runs_of_a_text_and_their_places(client: TestClient, retriever: Retriever) -> None:
    split, tokenizer = retriever.datastore.train, retriever.tokenizer
    first, _ = split.chunk_range(2)
    known = tokenizer.decode(split.tokens.read(first, first + 2).ravel()[1:].astype(np.int64))
    text = f"{known} qqq"
    answer = client.post("/trace", json={"text": text, "least": 6}).json()
    assert answer["text"] == text
    run = max(answer["runs"], key=lambda run: run["tokens"])
    assert text[slice(*run["text"])].strip() in known
    assert run["tokens"] >= 20
    assert run["occurrences"] >= 1
    assert 1 <= len(run["places"]) <= 3
    for run in answer["runs"]:
        for place in run["places"]:
            assert text_between(retriever, place) == text[slice(*run["text"])]
            assert place["document_id"] == retriever.lookup.chunk(place["start"][0]).document_id
            assert place["title"] == retriever.lookup.chunk(place["stop"][0]).title
    assert max(run["tokens"] for run in answer["runs"]) <= answer["tokens_in_runs"] <= answer["tokens"]
    assert client.post("/trace", json={"text": "qqq zzz", "least": 6}).json()["runs"] == []


def test_a_trace_names_no_more_documents_than_a_search_has_hits(client: TestClient) -> None:
    refused = client.post("/trace", json={"text": "a text", "documents": 101})
    assert refusal(refused)[:2] == (422, "documents")


@pytest.fixture
def without_suffixes(tiny_datastore: Datastore, tiny_run: Any) -> Iterator[TestClient]:
    retriever = Retriever.open(tiny_datastore.folder)
    settings = ServeSettings(name="tiny", allowed_hosts=("testserver",))
    with TestClient(make_app(retriever, LanguageModel.open(tiny_run, retriever, "cpu"), settings)) as client:
        yield client


def test_without_sorted_prefixes_a_trace_names_the_stage_and_sources_have_no_runs(
    client: TestClient, without_suffixes: TestClient
) -> None:
    refused = without_suffixes.post("/trace", json={"text": "a text"})
    assert refused.status_code == 404
    assert "--stage suffixes" in refused.json()["error"]["message"]
    sources = post(without_suffixes, GENERATE, return_sources=True).json()["sources"]
    assert set(sources) == {"chunks", "copies", "trust", "copied_tokens"}
    assert [each.get("/datastore").json()["trace"] for each in (client, without_suffixes)] == [True, False]


def serving(retriever: Retriever) -> TestClient:
    return TestClient(make_app(retriever, None, ServeSettings(allowed_hosts=("testserver",))))


def test_runs_come_from_all_datastores_and_name_theirs(two: Retriever) -> None:
    ships, trains = (split.folder for split in two.retrieval.splits)
    text = "the ship number 7 of the ships leaves the train number 21 of the trains leaves"
    with serving(two) as client:
        names = [each["name"] for each in client.get("/datastore").json()["datastores"]]
        answer = client.post("/trace", json={"text": text, "documents": 1}).json()
        for run in answer["runs"]:
            (place,) = run["places"]
            for chunk, _ in (place["start"], place["stop"]):
                stored = client.get(f"/chunks/{chunk}").json()
                assert stored["document_id"] == place["document_id"]
            assert text_between(two, place) == text[slice(*run["text"])]
    assert answer["datastores"] == names
    alone = {folder: trace(SuffixIndex.open(folder), tokens_of(two, text), SHORTEST_RUN) for folder in (ships, trains)}
    found = [(run["datastore"], run["tokens"], run["occurrences"]) for run in answer["runs"]]
    expected = [
        (name, run.stop - run.first, SuffixIndex.open(folder).count(run.match))
        for name, (folder, runs) in zip(names, alone.items(), strict=True)
        for run in runs
    ]
    assert sorted(found) == sorted(expected)
    assert {name for name, _, _ in found} == set(names)
    starts = [run["text"][0] for run in answer["runs"]]
    assert starts == sorted(starts)


def test_a_document_that_is_deleted_while_the_server_runs_is_in_no_answer(two: Retriever, tmp_path: Path) -> None:
    folder, text = tmp_path / "ships", "the ship number 7 of the ships leaves"
    shutil.copytree(two.datastore.folder, folder)
    retriever = Retriever.open(folder)

    def traced(client: TestClient) -> tuple[set[str], int]:
        """The documents of all places, and the tokens of the longest run."""
        runs = client.post("/trace", json={"text": text, "documents": 100, "least": 2}).json()["runs"]
        assert all(run["occurrences"] >= len(run["places"]) > 0 for run in runs)
        documents = {place["document_id"] for run in runs for place in run["places"]}
        return documents, max((run["tokens"] for run in runs), default=0)

    def shown(client: TestClient) -> set[str]:
        return {example["document_id"] for example in client.get("/examples?count=16").json()["examples"]}

    with serving(retriever) as client:
        before, passages, (documents, longest) = tokens_of(retriever, text), shown(client), traced(client)
        assert "ship/7" in documents
        assert longest == len(before)
        delete_documents(folder, ["ship/7", min(passages - {"ship/7"})])
        documents, longest = traced(client)
        assert documents
        assert "ship/7" not in documents
        assert 0 < longest < len(before)
        assert shown(client) == passages - {"ship/7", min(passages - {"ship/7"})}
        delete_documents(folder, [f"ship/{number}" for number in range(30)])
        assert (traced(client), shown(client)) == ((set(), 0), set())


def test_only_the_longest_runs_have_places_and_equal_runs_are_looked_up_once(
    two: Retriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[Match] = []

    def places(index: SuffixIndex, match: Match, most: int) -> list[Place]:
        searched.append(match)
        return find(index, match, most)

    find = SuffixIndex.places
    monkeypatch.setattr(trace_api, "_PLACED", 2)
    with serving(two) as client:
        monkeypatch.setattr(SuffixIndex, "places", places)  # the server found some runs before it was ready
        text = "of the ships leaves zzz ship number zzz the train zzz " * 3
        answer = client.post("/trace", json={"text": text, "least": 2}).json()
    runs = answer["runs"]
    assert len(searched) == len(set(searched)) == 2
    assert sum(run["count"] for run in runs) == len(all_runs(two, text, 2)) > len(runs) > 2
    placed = [run["tokens"] for run in runs if run["places"]]
    assert len(placed) >= 2
    assert min(placed) >= max(run["tokens"] for run in runs if not run["places"])
    assert all(run["occurrences"] for run in runs)
    covered = {token for _, run in all_runs(two, text, 2) for token in range(run.first, run.stop)}
    assert answer["tokens_in_runs"] == len(covered)


def test_repeats_are_one_run_with_their_places_in_the_text_and_runs_without_a_word_come_last(tmp_path: Path) -> None:
    zeros, line = "0, " * 40, "the index returns a row of the table "
    with open(write_corpus(tmp_path / "corpus.jsonl", 20), "a") as file:
        file.write(json.dumps({"id": "zeros", "text": zeros}) + "\n" + json.dumps({"id": "line", "text": line}) + "\n")
    config = tiny_config(tmp_path, tmp_path / "corpus.jsonl", skip_stages=("votes",))
    folder = build_local(replace(config, corpus=replace(config.corpus, split=(1000, 0, 0)))).folder
    text = f"{zeros * 2}. zzz {line}zzz {line}zzz {line}"
    with serving(Retriever.open(folder)) as client:
        answer = client.post("/trace", json={"text": text, "least": 4}).json()
    first, last = answer["runs"]
    assert text[slice(*first["text"])].strip() in line
    assert (first["distinctive"], first["count"], len(first["others"])) == (True, 3, 2)
    assert {text[slice(*each)] for each in first["others"]} == {text[slice(*first["text"])]}
    assert (last["distinctive"], last["text"][0]) == (False, 0)
    assert last["count"] > 2
    assert len(last["others"]) == 1


def all_runs(retriever: Retriever, text: str, least: int) -> list[tuple[TracedDatastore, Run]]:
    tokens = tokens_of(retriever, text)
    traced = traced_datastores(retriever.retrieval)
    return [(each, run) for each in traced for run in trace(each.index, tokens, least)]


@pytest.mark.parametrize("first", ["longest_match", "places"])
def test_a_trace_whose_client_has_left_searches_nothing_more(
    two: Retriever, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """A request is cancelled when its client leaves, when its time is over and when the server stops."""
    service, calls, is_over, begun = (
        Service(two, None, ServeSettings()),
        list[str](),
        threading.Event(),
        asyncio.Event(),
    )
    loop = asyncio.new_event_loop()

    def noted(name: str) -> Any:
        search = getattr(SuffixIndex, name)

        def then(*arguments: Any) -> Any:
            calls.append(name)
            if name == first and calls.count(name) == 2:
                loop.call_soon_threadsafe(begun.set)
                assert is_over.wait(PATIENCE)
            return search(*arguments)

        return then

    for name in ("longest_match", "places"):
        monkeypatch.setattr(SuffixIndex, name, noted(name))
    monkeypatch.setattr(trace_api, "_TOKENS", 1)
    monkeypatch.setattr(trace_api, "_PLACES", 1)

    async def leave() -> int:
        request = schemas.TraceRequest(text="the ship number 7 of the trains leaves zzz ship number 8", least=1)
        answering = asyncio.ensure_future(trace_api.trace_text(request, service))
        await begun.wait()
        answering.cancel()
        await asyncio.wait([answering])
        before = len(calls)
        is_over.set()
        await service.trace(None, [lambda: None])  # on the same thread, after the part that was under way
        return before

    try:
        before = loop.run_until_complete(leave())
        assert len(calls) == before
    finally:
        loop.close()


def tokens_of(retriever: Retriever, text: str) -> np.ndarray:
    return retriever.tokenizer.encode(text).astype(np.int64)


def test_datastores_without_sorted_prefixes_are_left_out_and_the_answer_names_the_others(
    two: Retriever, tmp_path: Path
) -> None:
    ships, trains = (split.folder for split in two.retrieval.splits)
    shutil.copytree(ships, bare := tmp_path / "ships" / "bare")
    manifest = read_json(bare / "manifest.json")
    del manifest["fingerprints"]["suffixes"]
    write_checked(bare / "manifest.json", manifest)
    with serving(Retriever.open(bare, trains)) as client:
        datastore = client.get("/datastore").json()
        assert datastore["trace"]
        answer = client.post("/trace", json={"text": "the train number 21 of the trains leaves"}).json()
    assert answer["datastores"] == [datastore["datastores"][1]["name"]]
    assert {run["datastore"] for run in answer["runs"]} == set(answer["datastores"])


def test_runs_of_a_generated_text_come_from_all_datastores(two: Retriever) -> None:
    texts, words = ChunkTexts(two), "the ship number 7 of the ships leaves the train number 21 of the trains leaves"
    prompt, new = np.split(tokens_of(two, words), [5])
    tokens = [GeneratedToken(0, int(token), two.tokenizer.decode([int(token)]), 0.0) for token in new]
    tokens[-1] = replace(tokens[-1], finish_reason="length")
    datastores = traced_datastores(two.retrieval)

    def runs_in(*searched: TracedDatastore) -> list[GeneratedRun]:
        finder = GeneratedRuns(searched, texts, prompt)
        return [run for token in tokens for run in finder.add(token)]

    both = runs_in(*datastores)
    assert {run.datastore for run in both} == {each.name for each in datastores}
    alone = [run for each in datastores for run in runs_in(each)]
    assert sorted(map(repr, both)) == sorted(map(repr, alone))
    assert [run.text[1] for run in both] == sorted(run.text[1] for run in both)
    last = max(both, key=lambda run: run.text[1])
    assert two.lookup.chunk(last.places[0].start[0]).document_id == last.places[0].document_id


# --- a generated text ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["neighbors too", "datastore alone"])
def copying(
    request: Any, retriever: Retriever, tiny_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestClient]:
    """A client of a model that copies from the whole datastore with almost all of its probability."""
    language_model = LanguageModel.open(tiny_run, retriever, "cpu")
    model = language_model.model
    assert model.copy_head is not None
    source = CopyHead(("datastore",), 1).datastore
    assert source is not None
    source.outer_bias.data.copy_(
        100.0 * torch.arange(1, 1 + len(MATCH_LENGTHS))
    )  # the longest match outweighs the others
    model.copy_head.datastore = source
    if request.param == "datastore alone":
        model.copy_head.context = model.copy_head.neighbors = None
        head = replace(model.settings.copy_head, datastore=True, neighbors=False)
        retrieval = replace(model.settings.retrieval, cca_layers=())
        model.settings = replace(model.settings, copy_head=head, retrieval=retrieval)
        assert not model.settings.retrieves
    suffixes = SuffixIndex.open(retriever.datastore.folder)
    copies = replace(language_model, suffixes=suffixes)
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    settings = ServeSettings(name="tiny", allowed_hosts=("testserver",), chat_template=str(template))
    with TestClient(make_app(retriever, copies, settings)) as client:
        yield client


def planted(retriever: Retriever) -> str:
    """The beginning of a passage of a document, without its beginning."""
    split = retriever.datastore.train
    first, _ = split.chunk_range(4)
    return retriever.tokenizer.decode(split.tokens.read(first, first + 1)[0, 2:].astype(np.int64))


def sources_of(path: str, answer: dict[str, Any]) -> dict[str, Any]:
    sources: dict[str, Any] = (answer if path == GENERATE else answer["choices"][0])["sources"]
    return sources


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("path", [*ENDPOINTS, "echo"])
def test_a_planted_passage_that_is_continued_has_its_document(
    copying: TestClient, retriever: Retriever, language_model: LanguageModel, path: str
) -> None:
    prompt, echo, name = planted(retriever), path == "echo", COMPLETIONS if path == "echo" else path
    body = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    body |= {"max_tokens": 40, "return_sources": True} | ({"echo": True} if echo else {})
    answer = post(copying, name, **body).json()
    text, sources = choices_of(name, answer)[0][0], sources_of(name, answer)
    before = len(prompt) * echo
    longest = max(sources["runs"], key=lambda run: run["tokens"])
    if path != CHAT:  # the template puts text between the passage and the answer
        assert longest["tokens"] >= 2 * SHORTEST_RUN
        first = sources["runs"][0]
        assert first["text"][0] == before
        assert first["prompt_tokens"] > 0
        tokens = np.concatenate([with_bos(language_model, prompt), language_model.tokenizer.encode(text[before:])])
        expected = [run for run in trace(SuffixIndex.open(retriever.datastore.folder), tokens, SHORTEST_RUN)]
        assert longest["tokens"] == max(run.stop - run.first for run in expected)
    for run in sources["runs"]:
        start, stop = run["text"]
        assert before <= start < stop <= len(text)
        assert run["prompt_tokens"] == 0 or start == before
        assert run["prompt_tokens"] < run["tokens"] >= SHORTEST_RUN
        assert 1 <= len(run["places"]) <= min(3, run["occurrences"])
        for place in run["places"]:
            assert text_between(retriever, place).endswith(text[start:stop])
            assert place["document_id"] == retriever.lookup.chunk(place["start"][0]).document_id
    ends = [run["text"][1] for run in sources["runs"]]
    assert ends == sorted(ends)


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_runs_of_a_stream_join_to_those_of_the_answer(copying: TestClient, retriever: Retriever, path: str) -> None:
    prompt = planted(retriever)
    body: dict[str, Any] = {"max_tokens": 30, "return_sources": True, "temperature": 1, "seed": 2}
    body |= {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    whole = sources_of(path, post(copying, path, **body).json())
    assert whole["runs"]
    events = [
        event if path == GENERATE else event["choices"][0]
        for event in events_of(post(copying, path, **body, stream=True))
    ]
    parts = [SOURCES.validate_python(event["sources"]) for event in events if "sources" in event]
    assert all(part.runs is not None for part in parts)
    streamed = joined(parts)
    assert streamed is not None
    assert SOURCES.dump_python(streamed, mode="json")["runs"] == whole["runs"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_characters_of_runs_are_in_a_text_that_a_stop_string_cuts(
    copying: TestClient, retriever: Retriever, stream: bool
) -> None:
    body: dict[str, Any] = {"prompt": planted(retriever), "max_tokens": 40, "return_sources": True}
    whole = post(copying, GENERATE, **body).json()["text"]
    body |= {"stop": [whole[20:28]], "stream": stream}
    answer = post(copying, GENERATE, **body)
    parts = events_of(answer) if stream else [answer.json()]
    text = "".join(part["text"] for part in parts)
    assert text == whole[: whole.index(whole[20:28])]
    runs = [run for part in parts for run in part["sources"]["runs"]]
    assert runs
    for run in runs:
        start, stop = run["text"]
        assert 0 <= start < stop <= len(text)
        assert text[start:stop] in text_between(retriever, run["places"][0])


def test_a_text_that_continues_nothing_stored_has_no_runs_of_the_prompt(
    copying: TestClient, retriever: Retriever
) -> None:
    """A run that ends before the answer begins is not listed."""
    body = {"prompt": planted(retriever), "max_tokens": 1, "return_sources": True, "logit_bias": {"0": 100}}
    answer = post(copying, COMPLETIONS, **body).json()
    assert sources_of(COMPLETIONS, answer)["runs"] == []
