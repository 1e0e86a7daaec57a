"""Copy an existing SentencePiece model or a local Hugging Face tokenizer into a datastore."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from indexing.store.errors import InputError
from indexing.store.files import write_bytes
from indexing.tokenization.backends import HuggingFace, SentencePiece, read_object
from indexing.tokenization.metadata import END_OF_TEXT, HUGGINGFACE_MODEL, MODEL, SENTENCEPIECE_NAMES, write_metadata
from indexing.tokenization.settings import TokenizerSettings
from indexing.tokenization.tokenizer import Tokenizer


def install_tokenizer(settings: TokenizerSettings, folder: Path) -> None:
    """Copy the tokenizer at `settings.path` to `folder`.

    Missing special tokens get new ids after the last one: padding always, begin and end of a document if the model has
    neither. If it has one of these, it serves as both. See `_adds_bos` for models that put no token in front of a text.

    Raises:
        InputError: the model does not exist or cannot be read, or the package that reads it is not installed.
    """
    assert not settings.is_trained
    source = Path(settings.path).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    if settings.kind == "sentencepiece":
        source = sentencepiece_file(source) or source
        if not source.is_file():
            raise InputError(
                f"tokenizer.path: {source} is not a file. Name a SentencePiece model (.model), or a folder with "
                f"{' or '.join(SENTENCEPIECE_NAMES)}."
            )
        model = SentencePiece(source)
        write_bytes(folder / MODEL, source.read_bytes())
        write_metadata(folder, settings.kind, model, model.special_ids())
        return
    source = source / HUGGINGFACE_MODEL if source.is_dir() else source
    if not source.is_file():
        raise InputError(
            f"tokenizer.path: {source} does not exist. Name a folder with a {HUGGINGFACE_MODEL} (a 'fast' tokenizer). "
            "Convert older tokenizers with transformers.AutoTokenizer.from_pretrained(…).save_pretrained(…)."
        )
    fast = HuggingFace(source)
    write_bytes(folder / HUGGINGFACE_MODEL, source.read_bytes())
    names = _special_names(source.parent)
    special = {role: fast.tokenizer.token_to_id(name) for role, name in names.items()}
    if special.get("bos") is None and special.get("eos") is None:
        special |= _special_ids(source.parent, fast.num_tokens())
    elif not _adds_bos(fast, special.get("bos"), source.parent):
        special["bos"] = fast.control_tokens().get(END_OF_TEXT, special.get("eos"))
    write_metadata(folder, settings.kind, fast, special)


def _adds_bos(model: HuggingFace, bos: int | None, folder: Path) -> bool:
    """True if the model's tokenizer puts BOS in front of a text, as its settings say or as its tokenizer.json does.

    Other models have read documents one after another, so a document begins with the token that ends documents. This is
    `<|endoftext|>` if the tokenizer has it, since EOS of chat models is often the end of a turn.
    """
    stated = special_settings(folder).get("add_bos_token")
    return bos is not None and (stated if isinstance(stated, bool) else model.first_id() == bos)


def sentencepiece_file(folder: Path) -> Path | None:
    """Return the SentencePiece model of a folder in Hugging Face's format or of a datastore's tokenizer; None without
    one."""
    return next((folder / name for name in SENTENCEPIECE_NAMES if (folder / name).is_file()), None)


def special_settings(folder: Path) -> dict[str, Any]:
    """Read the settings, including special tokens, in the files next to a Hugging Face tokenizer."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the later one takes precedence
        if (folder / name).is_file():
            settings.update(
                {key: value for key, value in read_object(folder / name).items() if value or key not in settings}
            )
    return settings


def _special_names(folder: Path) -> dict[str, str]:
    """The tokens for `pad`, `bos` and `eos` in the files next to a Hugging Face tokenizer."""
    settings = special_settings(folder)
    # BERT's tokenizers have no begin and end of a text, but [CLS] and [SEP] at the same positions.
    names = {"pad": ("pad_token",), "bos": ("bos_token", "cls_token"), "eos": ("eos_token", "sep_token")}
    special = {}
    for role, keys in names.items():
        value = next((settings[key] for key in keys if settings.get(key)), None)
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            special[role] = value
    return special


def _special_ids(folder: Path, num_tokens: int) -> dict[str, int]:
    """The ids of `bos` and `eos` in the model configuration next to a tokenizer. GPT-2 defines them only there."""
    config = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    ids = {role: config.get(f"{role}_token_id") for role in ("bos", "eos")}
    first = {role: value[0] if isinstance(value, list) and value else value for role, value in ids.items()}
    return {role: value for role, value in first.items() if isinstance(value, int) and 0 <= value < num_tokens}


def open_installed(settings: TokenizerSettings) -> Tokenizer:
    """Open a tokenizer as `install_tokenizer` installs it in a datastore, which raises the errors."""
    with tempfile.TemporaryDirectory() as installed:
        install_tokenizer(settings, Path(installed))
        return Tokenizer.open(Path(installed))


def open_huggingface(folder: str) -> Tokenizer:
    """Open a tokenizer in Hugging Face's format, see `open_installed`."""
    return open_installed(TokenizerSettings(kind="huggingface", path=folder))
