"""lm-eval's `hf` copies from a datastore: `--model hf-retro`."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # lm-eval reads it when imported; nothing is downloaded

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from retro.huggingface.lm_eval_model import CopyingHFLM
from retro.inference.language_model import LanguageModel
from tests.retro.huggingface.any_models import build_planted, planted_texts, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "gpt_neox", "gpt_neox")


@pytest.fixture(scope="module")
def datastore(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Datastore:
    return build_planted(tmp_path_factory.mktemp("planted"), folder)


@pytest.fixture(scope="module")
def passage(datastore: Datastore) -> str:
    return planted_texts(datastore.folder.parent)["trained-5"][:260]


def opened(folder: Path, datastore: Datastore, **options: Any) -> CopyingHFLM:
    named = {"pretrained": str(folder), "datastore": str(datastore.folder), "device": "cpu", "dtype": "float32"}
    return CopyingHFLM(**named | {"batch_size": 2} | options)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def test_log_likelihoods_on_are_those_of_scoring(folder: Path, datastore: Datastore, passage: str) -> None:
    """Of texts of different lengths in a batch, with neighbors too; OFF is lm-eval's own `hf`."""
    pairs = [(passage[:200], passage[200:230]), (passage[:88], passage[150:155]), ("8342", " 77")]
    off, on = (opened(folder, datastore, retrieval=mode, k="2") for mode in ("off", "on"))
    assert get_model("hf-retro") is CopyingHFLM
    scorer = LanguageModel.open(folder, datastore.folder, "cpu")
    for model, k in ((off, 0), (on, 2)):
        found = [likelihood for likelihood, _ in model.loglikelihood(requests("loglikelihood", *pairs))]
        rows = [scorer.tokenizer.encode(context + rest).astype(np.int64) for context, rest in pairs]
        expected = [scores[-len(rest) :].sum() for scores, (_, rest) in zip(scorer.score(rows, k), pairs, strict=True)]
        np.testing.assert_allclose(found, expected, rtol=0.02)  # scoring may use bfloat16


def test_generated_texts_are_copied(folder: Path, datastore: Datastore, passage: str) -> None:
    settings = {"until": ["\n\n"], "max_gen_toks": 20, "do_sample": False}
    texts = {
        mode: opened(folder, datastore, retrieval=mode).generate_until(
            requests("generate_until", (passage[:200], settings), (passage[30:90], settings)), disable_tqdm=True
        )
        for mode in ("off", "on")
    }
    assert texts["on"][0] == passage[200:220]
    assert texts["off"][0] != texts["on"][0]


def test_arguments_that_are_not_accepted_are_named(folder: Path, datastore: Datastore) -> None:
    with pytest.raises(InputError, match=r"retrieval = 'maybe': accepted are on and off"):
        opened(folder, datastore, retrieval="maybe")
    with pytest.raises(InputError, match=r"datastore is missing"):
        CopyingHFLM(pretrained=str(folder))
