"""The plugin of vLLM, with bases of vLLM's names: what needs no engine."""

import importlib
import math
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from indexing.store.errors import InputError
from retro.copying.rows import Row
from retro.copying.switch import RETRIEVAL

NAME = "retro.huggingface.vllm_processor"
BASES = ("vllm.v1.sample.logits_processor", "vllm.v1.worker.gpu.sample.logits_processor")
CPU = torch.device("cpu")


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin as vLLM loads it: the class that pyproject.toml registers."""
    for name in BASES:
        module = ModuleType(name)
        vars(module).update(LogitsProcessor=type("LogitsProcessor", (), {}), process_dict_updates=None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"]
    module_name, _, attribute = project["entry-points"]["vllm.logits_processors"]["retro"].partition(":")
    yield getattr(importlib.import_module(module_name), attribute)
    sys.modules.pop(NAME, None)


def config(settings: Any, named: Any = None, asynchronous: bool = False) -> SimpleNamespace:
    """A configuration of an engine, as far as the plugin reads it."""
    model = SimpleNamespace(logits_processors=named, tokenizer="")
    scheduler = SimpleNamespace(async_scheduling=asynchronous)
    return SimpleNamespace(additional_config=settings, model_config=model, scheduler_config=scheduler)


def request(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(extra_args=given)


def test_it_is_of_both_interfaces_of_vllm(plugin: Any) -> None:
    for name in BASES:
        assert issubclass(plugin, sys.modules[name].LogitsProcessor)  # type: ignore[attr-defined]


@pytest.mark.parametrize("settings", [None, {}, {"other": 1}])
def test_an_engine_without_a_datastore_is_as_without_the_plugin(plugin: Any, settings: Any) -> None:
    logits = torch.randn(2, 5)
    first, second = plugin(config(settings, asynchronous=True), CPU, False), plugin(config(settings), object())
    assert first.is_argmax_invariant()
    first.update_state(None)
    assert not second.add_request(0, request(retro_trust=list(RETRIEVAL.start)))
    assert first.apply(logits) is logits
    assert second.apply(logits, None) is logits


def test_engines_that_would_mix_twice_or_without_the_last_tokens_are_refused(plugin: Any) -> None:
    settings = {"retro_datastore": "peps"}
    with pytest.raises(InputError, match="leave out --logits-processors"):
        plugin(config(settings, named=[f"{NAME}:CopyingLogitsProcessor"]), object())
    with pytest.raises(InputError, match="--no-async-scheduling"):
        plugin(config(settings, asynchronous=True), CPU, False)


WRONG_TRUST: list[Any] = [1, None, "1111", {}, [], [1.0], [0.2] * 5, [0, 0, 0, 0], [0.5, 0.5, -0.1, 0.1]]
WRONG_TRUST += [[0.5, 0.1, 0.1, last] for last in (math.nan, math.inf, "0.3", None, True, 1.1)]
WRONG_STRENGTH: list[Any] = [3, -1, "a", None, True, math.nan, math.inf, [1]]


@pytest.mark.parametrize(
    "given",
    [{"retro_trust": trust} for trust in WRONG_TRUST] + [{"copy_strength": strength} for strength in WRONG_STRENGTH],
)
def test_wrong_arguments_are_refused_by_name(plugin: Any, given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(given))} = .*accepted"):
        plugin.validate_params(request(**given))
    with pytest.raises(InputError, match=f"{next(iter(given))} = .*accepted"):
        new_request(plugin, given)


def new_request(plugin: Any, given: dict[str, object]) -> Any:
    """What the plugin keeps of a request."""
    return sys.modules[plugin.__module__]._new_request(request(**given))


def test_a_name_that_is_not_known_is_refused(plugin: Any) -> None:
    with pytest.raises(ValueError, match=r"extra_args has retro_trsut: accepted .* retro_trust"):
        plugin.validate_params(request(retro_trsut=list(RETRIEVAL.start)))
    plugin.validate_params(request(other=1))
    with pytest.raises(InputError, match=r"additional_config has retro_datastores: .*retro_datastore, retro_networks"):
        plugin(config({"retro_datastores": "peps"}), object())
    with pytest.raises(InputError, match=r"retro_networks = 3: accepted is a path"):
        plugin(config({"retro_datastore": "peps", "retro_networks": 3}), object())


@pytest.mark.parametrize("trust", [RETRIEVAL.start, [1, 1, 1, 1], [0, 0, 0, 1], [1e-3, 0, 0, 0]])
def test_accepted_trust_sums_to_1_and_keeps_its_ratios(plugin: Any, trust: Any) -> None:
    kept = np.array(new_request(plugin, {"retro_trust": trust}).trust)
    np.testing.assert_allclose(kept, np.array(trust) / sum(trust), rtol=1e-12)


def test_trust_needs_the_log_probabilities_of_the_prompt(plugin: Any) -> None:
    trust_of = sys.modules[plugin.__module__].trust_of
    with pytest.raises(InputError, match=r"SamplingParams\(prompt_logprobs=20\)"):
        trust_of(None, SimpleNamespace(prompt_token_ids=[1, 2], prompt_logprobs=None))


def test_each_row_has_the_last_tokens_of_its_text_and_of_its_draft(plugin: Any) -> None:
    """Slot 3 has 100 tokens and a draft of two, slot 0 has 5 tokens; a request that copies nothing is left out."""
    committed = torch.zeros((4, 128), dtype=torch.int32)
    committed[3, :100], committed[0, :5] = torch.arange(100, 200), torch.arange(5)
    states = SimpleNamespace(all_token_ids=SimpleNamespace(gpu=committed))
    texts: list[Row] = []

    class Mixer:
        def row(self, tokens: np.ndarray, **given: Any) -> Row:
            texts.append(Row(tokens, None, 0, **given))
            return texts[-1]

        def mix_rows(self, rows: list[Row], scores: torch.Tensor) -> torch.Tensor:
            return scores + 1

    processor = plugin(config({}), states)
    processor._processor = Mixer()
    assert processor.add_request(3, request())
    assert processor.add_request(0, request())
    assert not processor.add_request(1, request(copy_strength=0))
    step = SimpleNamespace(
        expanded_idx_mapping=torch.tensor([1, 3, 3, 3, 0], dtype=torch.int32),
        expanded_local_pos=torch.tensor([0, 0, 1, 2, 0], dtype=torch.int32),
        pos=torch.tensor([9, 99, 100, 101, 4]),
        input_ids=torch.tensor([7, 199, 250, 251, 4], dtype=torch.int32),
    )
    mixed = processor.apply(torch.zeros(5, 3), step)
    assert mixed[:, 0].tolist() == [0, 1, 1, 1, 1]
    text = [*range(100, 200), 250, 251]
    assert [row.tokens.tolist() for row in texts] == [text[36:100], text[37:101], text[38:102], [*range(5)]]
    assert [row.num_generated for row in texts] == [0, 1, 2, 0]
