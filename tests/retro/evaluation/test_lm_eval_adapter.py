"""lm-eval runs local tasks with the registered model and with the HTTP API, and both agree."""

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # lm-eval reads it when imported; nothing is downloaded

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from pipelines.cli.main import main
from retro.evaluation.lm_eval_adapter import RetroLM
from retro.inference.language_model import LanguageModel
from retro.training.trainer import train
from tests.conftest import tiny_config, wait_until

WORDS = ("index", "chunk", "token", "neighbor", "vector", "search")
TASKS = ("retro_choice", "retro_text", "retro_generate")
FLOAT32 = 1e-4
"""Tolerance for a sum of log-probabilities: batches of other shapes round differently."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, tiny_datastore: Datastore) -> Path:
    """A few steps of training, so that retrieval affects the output."""
    config = tiny_config(tmp_path_factory.mktemp("adapter"), tiny_corpus)
    settings = replace(config.train, precision="float32")
    train(config.run, replace(config, datastore=tiny_datastore.folder, train=settings).run_settings)
    return config.run


@pytest.fixture(scope="module")
def language_model(run: Path) -> LanguageModel:
    return LanguageModel.open(run, device="cpu")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three tasks on one file: multiple choice, likelihood of whole texts, generation."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            "context": f"# Document {number}\n\nthe {word} of a 模型 is a document and ",
            "text": f"# Document {number}\n\n" + f"the {word} of a 检索 is {number}. " * 12,
            "choices": [f" the {word}", f" of {word} memory.", " 数据"],
            "answer": number % 3,
        }
        for number, word in enumerate(WORDS)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = {"dataset_path": "json", "test_split": "test"}
    source["dataset_kwargs"] = {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "cache")}
    settings = {
        "retro_choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{context}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "retro_text": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
        },
        "retro_generate": {
            "output_type": "generate_until",
            "doc_to_text": "{{context}}",
            "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["never there"], "max_gen_toks": 12, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, each in settings.items():  # JSON is YAML
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name} | source | each))
    return folder


@pytest.fixture(scope="module")
def server_url(language_model: LanguageModel) -> Iterator[str]:
    """URL of `retro serve` with this model and a token."""
    import uvicorn

    from retro.server.app import make_app
    from retro.server.settings import ServeSettings

    assert language_model.retriever is not None
    app = make_app(language_model.retriever, language_model, ServeSettings(name="tiny"), token="secret")
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1/completions"
    server.should_exit = True
    thread.join()


def evaluate(model: Any, tasks: Path, **arguments: Any) -> dict[str, Any]:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    results = simple_evaluate(model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, **arguments)
    assert results is not None
    return results


def responses(results: dict[str, Any], task: str) -> list[Any]:
    ordered = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [response for sample in ordered for response in sample["resps"]]


@pytest.mark.slow
@pytest.mark.parametrize("retrieval", ["on", "off"])
def test_registered_model_and_http_api_agree(
    run: Path, language_model: LanguageModel, tasks: Path, server_url: str, retrieval: str, monkeypatch
) -> None:
    arguments = f"checkpoint={run},retrieval={retrieval},k=2"
    ours = evaluate("retro", tasks, model_args=arguments, device="cpu", batch_size=4)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    name = "tiny" if retrieval == "on" else "tiny:off"
    client = f"model={name},base_url={server_url},tokenizer_backend=remote,auth_token=secret,max_length={language_model.context}"
    theirs = evaluate("local-completions", tasks, model_args=client, batch_size=3)

    for task in TASKS:
        for metric, value in ours["results"][task].items():
            if isinstance(value, float):
                assert theirs["results"][task][metric] == pytest.approx(value, rel=1e-5), (task, metric)
    for mine, other in zip(responses(ours, "retro_choice"), responses(theirs, "retro_choice"), strict=True):
        assert mine[0][0] == pytest.approx(other[0][0], abs=FLOAT32)
        assert mine[0][1] == other[0][1]
    texts = [responses(each, "retro_text") for each in (ours, theirs)]
    assert np.allclose(np.array(texts[0], dtype=float), np.array(texts[1], dtype=float), atol=10 * FLOAT32)
    assert responses(ours, "retro_generate") == responses(theirs, "retro_generate")
    assert all(text for (text,) in responses(ours, "retro_generate"))
    fingerprints = ours["config"]["fingerprints"]
    assert fingerprints["checkpoint"] == language_model.checkpoint.fingerprint
    assert (fingerprints["datastore"] is None) == (retrieval == "off")


def make_requests(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


@pytest.fixture(scope="module")
def adapters(run: Path) -> dict[str, RetroLM]:
    return {each: RetroLM(str(run), retrieval=each, device="cpu", batch_size=3) for each in ("on", "off")}


@pytest.mark.parametrize("retrieval", ["on", "off"])
def test_a_continuation_is_scored_after_its_context_in_a_new_document(
    adapters: dict[str, RetroLM], language_model: LanguageModel, retrieval: str
) -> None:
    model, k = adapters[retrieval], 2 if retrieval == "on" else 0
    context, continuation = "# Document 3\n\nthe index of a model ", "is a neighbor"
    whole = [model.prefix_token_id, *model.tok_encode(context + continuation)]
    start = 1 + len(model.tok_encode(context.rstrip()))
    (scores,) = language_model.score([np.array(whole)], k)
    ((found, greedy),) = model.loglikelihood(make_requests("loglikelihood", (context, continuation)), disable_tqdm=True)
    assert found == pytest.approx(scores[start - 1 :].sum(), abs=FLOAT32)
    assert not greedy
    pairs = [("", "the index"), (context * 9, continuation), (context, continuation)]  # the second is too long
    empty, long, again = model.loglikelihood(make_requests("loglikelihood", *pairs), disable_tqdm=True)
    first = language_model.score([np.array([model.prefix_token_id, *model.tok_encode("the index")])], k)[0]
    assert empty[0] == pytest.approx(first.sum(), abs=FLOAT32)
    assert again[0] == pytest.approx(found, abs=FLOAT32)
    assert long[0] < 0


def test_a_token_across_the_border_is_scored_as_lm_eval_splits_it(
    adapters: dict[str, RetroLM], language_model: LanguageModel
) -> None:
    model, joined = adapters["off"], 0
    for context, continuation in [("a chunk of the in", "dex and a token"), ("the neigh", "bor is"), ("a", " token")]:
        before, whole = model.tok_encode(context), model.tok_encode(context + continuation)
        split = [model.prefix_token_id, *before, *whole[len(before) :]]  # not the whole text if a token joins both
        of_split, of_whole = language_model.score([np.array(split), np.array([model.prefix_token_id, *whole])])
        ((found, _),) = model.loglikelihood(make_requests("loglikelihood", (context, continuation)), disable_tqdm=True)
        assert found == pytest.approx(of_split[len(before) :].sum(), abs=FLOAT32)
        differs = whole[: len(before)] != before
        assert differs == (found != pytest.approx(of_whole[len(before) :].sum(), abs=FLOAT32))
        joined += differs
    assert 0 < joined < 3


def test_the_models_own_continuation_is_greedy(adapters: dict[str, RetroLM]) -> None:
    context = "# Document 3\n\nthe index of"
    (text,) = adapters["on"].generate_until(make_requests("generate_until", (context, {"max_gen_toks": 6})), True)
    tokens = adapters["on"].tok_encode(context)
    continued = adapters["on"].tok_encode(context + text)[len(tokens) :]
    ((_, greedy),) = adapters["on"]._loglikelihood_tokens([(None, tokens, continued[:3])], disable_tqdm=True)
    ((_, other),) = adapters["on"]._loglikelihood_tokens([(None, tokens, [continued[0] ^ 1])], disable_tqdm=True)
    assert greedy
    assert not other


@pytest.mark.parametrize("retrieval", ["on", "off"])
def test_every_token_of_a_long_text_is_scored_once(adapters: dict[str, RetroLM], retrieval: str) -> None:
    model = adapters[retrieval]
    short, long = "the index", "the index of a chunk is a document. " * 20
    windows = list(model._windows(long))
    assert len(windows) > 2
    assert [token for _, _, scored in windows for token in scored] == model.tok_encode(long)
    assert max(len(context) + len(scored) for _, context, scored in windows) < model.language_model.context
    found = model.loglikelihood_rolling(
        make_requests("loglikelihood_rolling", (short,), (long,), ("",)), disable_tqdm=True
    )
    ((plain, _),) = model.loglikelihood(make_requests("loglikelihood", ("", short)), disable_tqdm=True)
    assert found[0] == pytest.approx(plain, abs=FLOAT32)
    assert found[1] < found[0]
    assert found[2] == 0


def test_generation_keeps_the_order_stops_and_is_greedy_by_default(adapters: dict[str, RetroLM]) -> None:
    contexts = ["# Document 3\n\nthe index of", "the", "# Document 12\n\na chunk of the index and"]
    asked = [(each, {"until": "zzz", "max_gen_toks": 5}) for each in contexts]
    model = adapters["on"]
    together = model.generate_until(make_requests("generate_until", *asked), disable_tqdm=True)
    alone = [model.generate_until(make_requests("generate_until", each), disable_tqdm=True)[0] for each in asked]
    assert together == alone
    stop = together[0][1:3]
    (stopped,) = model.generate_until(
        make_requests("generate_until", (contexts[0], {"until": [stop], "max_gen_toks": 5})), disable_tqdm=True
    )
    assert stopped == together[0][: together[0].index(stop)]
    sampled = [
        model.generate_until(
            make_requests("generate_until", (contexts[0], {"do_sample": True, "temperature": 2.0, "seed": seed})), True
        )[0]
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


def test_unsupported_arguments_are_rejected(run: Path, adapters: dict[str, RetroLM]) -> None:
    with pytest.raises(InputError, match="retrieval = 'maybe': accepted are on and off"):
        RetroLM(str(run), retrieval="maybe")
    with pytest.raises(InputError, match="k = 0"):
        RetroLM(str(run), k=0)
    for given, words in (({"num_beams": 4}, "'num_beams'"), ({"max_gen_toks": 500}, "no room for a prompt")):
        with pytest.raises(InputError, match=words):
            adapters["off"].generate_until(make_requests("generate_until", ("x", given)), disable_tqdm=True)


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_fingerprints(run: Path, tasks: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "results.json"
    arguments = ["--include-path", str(tasks), "--limit", "2", "--output", str(out), "--device", "cpu"]
    assert main(["eval", "harness", str(run), "--tasks", "retro_choice", "retro_t*", *arguments]) == 0
    assert "bits_per_byte" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert set(written["results"]) == {"retro_choice", "retro_text"}
    assert set(written["fingerprints"]) == {"checkpoint", "datastore"}
    assert (written["retrieval"], written["k"]) == ("on", 2)
    assert main(["eval", "harness", str(run), "--tasks", "no_such_task", *arguments]) == 2
    assert "no_such_task: lm-eval has no such task" in capsys.readouterr().err


def test_the_datastore_can_be_given(run: Path, tiny_datastore: Datastore) -> None:
    # lm-eval's command line passes cuda:0 when no device is given.
    model = RetroLM(str(run), datastore=str(tiny_datastore.folder), device="cuda:0", batch_size="auto")
    assert isinstance(model.language_model.retriever, Retriever)
    assert model.get_model_info()["fingerprints"]["datastore"] == tiny_datastore.fingerprint
