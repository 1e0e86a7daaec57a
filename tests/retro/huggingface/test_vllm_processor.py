"""vLLM with the processor generates what transformers generates with it. Skipped where vLLM is not installed."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}

from vllm import LLM, SamplingParams

from retro.huggingface import DatastoreLogitsProcessor
from retro.huggingface.vllm_processor import CopyingLogitsProcessor, trust_of
from tests.retro.huggingface.any_models import FAMILIES, build_planted, planted_texts, save_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
NEW = 24


def test_tokens_and_trust_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    wide = {"hidden_size": 128, "head_dim": 64}  # vLLM has no attention for heads of 16
    monkeypatch.setitem(FAMILIES, "llama", FAMILIES["llama"] | wide)
    folder = save_model(tmp_path / "llama", "llama")
    datastore, texts = build_planted(tmp_path, folder).folder, planted_texts(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    prompts = [texts["trained-14"][:200], texts["trained-3"][50:120], "8342 6190"]
    ids = [tokenizer(text)["input_ids"] for text in prompts]

    llm = LLM(
        str(folder), dtype="float32", max_model_len=512, enforce_eager=True,
        logits_processors=[CopyingLogitsProcessor], additional_config={"retro_datastore": str(datastore)},
    )  # fmt: skip
    inputs, drawn = [{"prompt_token_ids": tokens} for tokens in ids], {"temperature": 0, "max_tokens": NEW}
    off = SamplingParams(**drawn, prompt_logprobs=1, extra_args={"copy_strength": 0})
    first = llm.generate(inputs, off, use_tqdm=False)
    judge = DatastoreLogitsProcessor.open(datastore, tokenizer)
    trusts = [trust_of(judge, output) for output in first]
    on = [SamplingParams(**drawn, min_tokens=NEW, extra_args={"retro_trust": trust}) for trust in trusts]
    second = llm.generate(inputs, on, use_tqdm=False)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    processor = DatastoreLogitsProcessor.open(datastore, tokenizer, model)
    for tokens, without, copied, trust in zip(ids, first, second, trusts, strict=True):
        for processors, output in (([], without), ([processor], copied)):
            expected = model.generate(
                torch.tensor([tokens]),
                logits_processor=processors,
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=False,
            )
            generated = list(output.outputs[0].token_ids)
            assert expected[0, len(tokens) :].tolist()[: len(generated)] == generated
        np.testing.assert_allclose(trust, processor._texts[0].row.trust, rtol=1e-3)
    assert tokenizer.decode(second[0].outputs[0].token_ids) == texts["trained-14"][200 : 200 + NEW]


@pytest.mark.parametrize(
    "given", [{"copy_strength": 3}, {"copy_strength": "a"}, {"retro_trust": [1.0]}, {"retro_trust": 1}]
)
def test_wrong_arguments_are_refused_by_name(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(given))} = .*accepted"):
        CopyingLogitsProcessor.validate_params(SimpleNamespace(extra_args=given))
