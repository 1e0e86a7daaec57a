"""Fit a model to a datastore: both must have the same vocabulary and chunk length."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.tokenization.tokenizer import Tokenizer
from retro.model_settings import ModelSettings

ADVICE = "Name a datastore built with the model's tokenizer and chunk length."


def fit_to(model: ModelSettings, datastore: Mapping[str, Any], source: object) -> ModelSettings:
    """Settings with `vocab_size` and `chunk_length` of a datastore where they are 0.

    The model may have more rows than the tokenizer has ids, as many published models do.

    Args:
        model: its settings.
        datastore: the manifest of the datastore.
        source: the name of the datastore in errors.

    Raises:
        InputError: the model has another chunk length, or fewer rows than the tokenizer has ids.
    """
    check_fits(model, datastore, source, advice="Set it to 0 to take the datastore's, or name another datastore.")
    return replace(
        model,
        vocab_size=model.vocab_size or datastore["vocab_size"],
        chunk_length=model.chunk_length or datastore["chunk_length"],
    )


def check_fits(
    model: ModelSettings,
    datastore: Mapping[str, Any],
    source: object,
    *,
    num_ids: int = 0,
    tokenizer: str = "",
    advice: str = ADVICE,
) -> None:
    """Raise InputError unless a model can read the tokens and chunks of a datastore.

    Args:
        model: its settings; sizes of 0 fit every datastore.
        datastore: `vocab_size` and `chunk_length`: the manifest, or what a server reports. With `tokenizer`, the
            fingerprint of its tokenizer, this is compared too.
        source: the name of the datastore in the error.
        num_ids: ids of the tokenizer that the model was trained with; 0 = unknown, so the model may have more rows than
            ids.
        tokenizer: fingerprint of the tokenizer that the model was trained with; empty = unknown.
        advice: last sentence of the error.
    """
    ids, length = datastore.get("vocab_size", 0), datastore.get("chunk_length", 0)
    if ids != num_ids if num_ids else 0 < model.vocab_size < ids:
        ours = f"the model's tokenizer has {num_ids} ids" if num_ids else f"model.vocab_size = {model.vocab_size}"
        raise InputError(f"{ours}, but {source} has vocab_size = {ids}. {advice}")
    if tokenizer and datastore.get("tokenizer", tokenizer) != tokenizer:
        raise InputError(f"{source} has another tokenizer than the model: other tokens for the same ids. {advice}")
    if model.chunk_length not in (0, length):
        raise InputError(
            f"model.chunk_length = {model.chunk_length}, but {source} has chunk_length = {length}. {advice}"
        )


def check_tokens(datastore: Datastore, tokenizer: Any) -> None:
    """Raise InputError unless a tokenizer of transformers has the tokens of a datastore for the same ids; it may have
    more."""
    theirs, ours = tokenizer.get_vocab(), Tokenizer.open(datastore.folder / "tokenizer").vocabulary
    if different := [token for token, number in ours.items() if theirs.get(token) != number]:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise InputError(
            f"{datastore.folder} was made with another tokenizer than {name}: {len(different):,} of its {len(ours):,} tokens have other "
            f"ids. Make a datastore with the model's: `retro index CONFIG --tokenizer.kind huggingface --tokenizer.path {name}`."
        )
