"""A table with more rows than the tokenizer has ids: these rows are never generated, likeliest or the greedy choice."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from indexing.store.errors import InputError
from indexing.tokenization.installation import open_huggingface
from indexing.tokenization.tokenizer import Tokenizer
from retro.device import choose_placement
from retro.inference.language_model import LanguageModel
from retro.inference.sampling import draw
from retro.inference.settings import GenerationSettings
from tests.conftest import write_byte_tokenizer
from tests.retro.small_model import build

ROWS = 280


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """257 ids, and one more for padding."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, ["<end>"], bos_token="<end>", eos_token="<end>")
    return open_huggingface(str(folder))


@pytest.fixture(scope="module")
def language_model(tokenizer: Tokenizer) -> LanguageModel:
    """Logits of the rows above the tokenizer's ids are the largest ones."""
    model = build(vocab_size=ROWS)
    with torch.no_grad():
        model.output_weight[257:] *= 8
    checkpoint: Any = SimpleNamespace(settings={}, model=model.settings)
    return LanguageModel(checkpoint, model, tokenizer, None, choose_placement("cpu", "float32"), 64)


def test_the_rows_above_the_ids_and_added_padding_are_masked(language_model: LanguageModel) -> None:
    assert (language_model.tokenizer.num_model_tokens, language_model.tokenizer.vocab_size) == (257, 258)
    assert language_model.masked is not None
    assert language_model.masked.tolist() == [token >= 257 for token in range(ROWS)]


@pytest.mark.parametrize("sampling", [{"temperature": 2.0, "top_k": 0, "top_p": 1.0}, {"temperature": 0.0}])
def test_they_are_never_generated_with_or_without_drafts(language_model: LanguageModel, sampling: dict) -> None:
    prompts = [np.array(language_model.tokenizer.encode("the index of the index of the"))] * 2
    for drafts in (True, False):
        settings = GenerationSettings(max_tokens=25, ignore_eos=True, logprobs=5, drafts=drafts, **sampling)
        new = [token for step in language_model.generate(prompts, settings) for token in step]
        assert len(new) == 50
        assert max(token.token for token in new) < 257
        assert max(likely for token in new for likely, _ in token.top) < 257
        assert {len(token.top) for token in new} == {5}


def test_they_are_no_likeliest_tokens_of_a_text(language_model: LanguageModel) -> None:
    tokens = language_model.tokenizer.encode("a text")
    (scores,) = language_model.score_with_likeliest([tokens], top=5)
    assert scores.likeliest.max() < 257
    (everything,) = language_model.score_with_likeliest([tokens], top=ROWS)
    assert everything.likeliest.shape == (5, 257)
    assert np.isfinite(everything.likeliest_log_probabilities).all()


def test_greedy_continuations_count_as_greedy_in_lm_eval(language_model: LanguageModel) -> None:
    pytest.importorskip("lm_eval")
    from retro.evaluation.lm_eval_adapter import RetroLM

    adapter = RetroLM.__new__(RetroLM)
    super(RetroLM, adapter).__init__()
    adapter.language_model, adapter.k, adapter.batch_size, adapter.max_length = language_model, 0, 4, 63
    context = language_model.tokenizer.encode("the index").tolist()
    prompt = np.array([adapter.prefix_token_id, *context])
    settings = GenerationSettings(max_tokens=6, temperature=0.0, ignore_eos=True)
    greedy = [token.token for step in language_model.generate([prompt], settings) for token in step]
    assert max(greedy) < 257
    other = [*greedy[:-1], (greedy[-1] + 1) % 257]
    results = adapter._loglikelihood_tokens([(None, context, greedy), (None, context, other)], disable_tqdm=True)
    assert [is_greedy for _, is_greedy in results] == [True, False]


def test_texts_with_such_ids_are_refused(language_model: LanguageModel) -> None:
    with pytest.raises(InputError, match="token id 258; this model accepts 0 to 257"):
        language_model.score([np.array([1, 258])])
    with pytest.raises(InputError, match="logit_bias has the token id 270; accepted are 0 to 257"):
        language_model.generate([np.array([1])], GenerationSettings(logit_bias=((270, 100.0),)))


@pytest.mark.parametrize("random", [0.0, 0.5, float(np.nextafter(np.float32(1), np.float32(0))), 1.0])
def test_masked_ids_are_not_drawn_whatever_the_logits_and_the_random_number(random: float) -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[0.0, 0, 9, 9], [-inf, -inf, inf, 0], [nan] * 4, [1e30, -1e30, inf, 0]])
    masked = torch.tensor([False, False, True, True])
    for temperature in (0.0, 1.0, 100.0):
        for top_k in (0, 3):
            settings = [GenerationSettings(temperature=temperature, top_k=top_k, top_p=1.0, logprobs=4)] * len(logits)
            for token, _, top in draw(logits, logits, settings, [random] * len(logits), masked):
                assert token < 2
                assert {likely for likely, _ in top} <= {0, 1}
