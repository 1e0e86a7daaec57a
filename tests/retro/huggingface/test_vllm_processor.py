"""vLLM with the plugin generates what transformers generates with the processor. Skipped where vLLM is not installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retro.huggingface import DatastoreLogitsProcessor
from tests.retro.huggingface.any_models import FAMILIES, build_planted, planted_texts, save_model
from tests.retro.huggingface.vllm_engine import write_triton_backend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.filterwarnings("default"),
]
NEW = 24
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model, a datastore with its tokenizer, prompts, and what transformers generates after them."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("vllm")
    wide = {"hidden_size": 128, "head_dim": 64}  # vLLM has no attention for heads of 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "llama", FAMILIES["llama"] | wide)
        saved = save_model(folder / "llama", "llama")
    datastore, texts = build_planted(folder, saved).folder, planted_texts(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(saved)
    prompts = [texts["trained-14"][:200], texts["trained-3"][50:120], "8342 6190"]
    made: dict[str, Any] = {"model": saved, "datastore": datastore, "off": [], "on": [], "trusts": []}
    made["prompts"] = [tokenizer(text)["input_ids"] for text in prompts]
    made["planted"] = tokenizer(texts["trained-14"][200 : 200 + NEW])["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    processor = DatastoreLogitsProcessor.open(datastore, tokenizer, model)
    for tokens in made["prompts"]:
        for name, processors in (("off", []), ("on", [processor])):
            expected = model.generate(
                torch.tensor([tokens]),
                logits_processor=processors,
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=False,
            )
            made[name].append(expected[0, len(tokens) :].tolist())
        made["trusts"].append([*processor._texts[0].row.trust])
    return made


def run_engine(made: dict[str, Any], folder: Path, runner: int, trust: Any = None, **engine: Any) -> dict[str, Any]:
    """What an engine in another process generates; with the second runner in Triton's interpreter if there is no GPU."""
    job = {"model": str(made["model"]), "prompts": made["prompts"], "new": NEW, "trust": trust, "engine": engine}
    (folder / "job.json").write_text(json.dumps(job))
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"VLLM_USE_V2_MODEL_RUNNER": str(runner - 1)}
    if runner == 2 and not torch.cuda.is_available():
        environment |= {"TRITON_INTERPRET": "1", "PYTHONPATH": str(write_triton_backend(folder / "triton"))}
    command = [sys.executable, "-m", "tests.retro.huggingface.vllm_engine", folder / "job.json", folder / "answer.json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads((folder / "answer.json").read_text())


@pytest.mark.parametrize(("runner", "speculative"), [(1, False), (2, False), (2, True)])
def test_tokens_and_trust_are_those_of_transformers(
    made: dict[str, Any], tmp_path: Path, runner: int, speculative: bool
) -> None:
    drafts = {"method": "draft_model", "model": str(made["model"]), "num_speculative_tokens": 3}
    settings = {"additional_config": {"retro_datastore": str(made["datastore"])}}
    found = run_engine(made, tmp_path, runner, **settings | ({"speculative_config": drafts} if speculative else {}))
    assert (found["accepted"] > 0) == speculative
    for name in ("off", "on"):
        for expected, generated in zip(made[name], found[name], strict=True):
            assert expected[: len(generated)] == generated
    np.testing.assert_allclose(found["trusts"], made["trusts"], rtol=1e-3)
    assert found["on"][0] == made["planted"]


def test_an_engine_without_a_datastore_may_speculate_and_copies_nothing(made: dict[str, Any], tmp_path: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    found = run_engine(made, tmp_path, 1, trust=made["trusts"][0], speculative_config=drafts)
    assert found["on"] == made["off"]
    assert found["accepted"] > 0
