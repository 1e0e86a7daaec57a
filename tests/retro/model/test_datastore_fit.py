"""Sizes shared by a model and its datastore: copied where they are 0, otherwise compared."""

import pytest

from indexing.store.errors import InputError
from retro.model.datastore_fit import check_fits, fit_to
from retro.model.retro import Retro
from retro.model_settings import AttentionSettings, ModelSettings

MANIFEST = {"vocab_size": 50, "chunk_length": 16, "pad_id": 3}


def test_sizes_of_zero_are_copied_from_the_datastore() -> None:
    assert fit_to(ModelSettings(dropout=0.5), MANIFEST, "here") == ModelSettings(
        dropout=0.5, vocab_size=50, chunk_length=16
    )
    larger = ModelSettings(vocab_size=64, chunk_length=16)  # more embedding rows than token ids
    assert fit_to(larger, MANIFEST, "here") == larger


@pytest.mark.parametrize(
    ("model", "num_ids", "words"),
    [
        (ModelSettings(chunk_length=32), 0, r"model\.chunk_length = 32, but here has chunk_length = 16\. .*0"),
        (ModelSettings(vocab_size=49), 0, r"model\.vocab_size = 49, but here has vocab_size = 50\. .*0"),
        (ModelSettings(vocab_size=64), 49, r"the model's tokenizer has 49 ids, but here has vocab_size = 50\. .*0"),
    ],
)
def test_mismatched_sizes_are_rejected_with_both_numbers(model: ModelSettings, num_ids: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_fits(model, MANIFEST, "here", num_ids=num_ids, advice="Set it to 0.")
    if not num_ids:
        with pytest.raises(InputError, match=words):
            fit_to(model, MANIFEST, "here")


def test_another_tokenizer_of_the_same_size_is_rejected() -> None:
    model, found = ModelSettings(vocab_size=50), {**MANIFEST, "tokenizer": "a"}
    for ours, theirs in (("a", found), ("", found), ("a", MANIFEST)):
        check_fits(model, theirs, "here", tokenizer=ours)
    with pytest.raises(InputError, match="here has another tokenizer than the model"):
        check_fits(model, found, "here", tokenizer="b")


def test_limits_by_chunk_length_are_checked_once_it_is_known() -> None:
    settings = ModelSettings(attention=AttentionSettings(smeared_tokens=17))
    with pytest.raises(InputError, match=r"model\.attention\.smeared_tokens = 17: .* 16"):
        fit_to(settings, MANIFEST, "here")


@pytest.mark.parametrize("missing", ["vocab_size", "chunk_length"])
def test_a_model_with_unknown_sizes_is_rejected(missing: str) -> None:
    sizes = {"vocab_size": 50, "chunk_length": 16, missing: 0}
    with pytest.raises(InputError, match=rf"model\.{missing} is 0"):
        Retro(ModelSettings(**sizes))  # type: ignore[arg-type]
