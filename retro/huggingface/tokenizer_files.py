"""The tokenizer of an exported model: files with which AutoTokenizer produces the same ids as the datastore.

    datastore's SentencePiece model ─► the same file, which SentencePiece reads (tokenization.py)
    datastore's tokenizer.json ──────► with the datastore's special tokens, and the beginning-of-document token in front of a text
    folder in Hugging Face's format ─► the same files

SentencePiece models are not converted: models of the same type in `tokenizers` give other results for long texts. The
exported tokenizer adds the beginning-of-document token itself, because all texts begin with it here. The file has the
datastore's name for it: transformers 5 would convert a `tokenizer.model` by itself if the class is not registered, and
give other ids.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from indexing.store.errors import InputError
from indexing.store.files import read_json, write_bytes, write_json
from indexing.store.remote import present
from indexing.tokenization.backends import SentencePiece
from indexing.tokenization.metadata import HUGGINGFACE_MODEL, MODEL
from indexing.tokenization.tokenizer import Tokenizer

CONFIG = "tokenizer_config.json"
_COPIED = (
    HUGGINGFACE_MODEL, CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
)  # fmt: skip


def write_tokenizer(source: Path, folder: Path) -> None:
    """Write the files of a datastore's tokenizer.

    Args:
        source: folder or URL of a datastore's `tokenizer`.
        folder: output folder.

    Raises:
        InputError: the tokenizer is missing, or the package that reads it is not installed.
    """
    tokenizer = Tokenizer.open(source)
    roles = {role: int(getattr(tokenizer, f"{role}_id")) for role in ("bos", "eos", "pad")}
    config = {"clean_up_tokenization_spaces": False, "padding_side": "left"}
    if tokenizer.meta.kind == "huggingface":
        content = read_json(present(source / HUGGINGFACE_MODEL))
        names = _names(roles, _vocabulary(content))
        _add(content, roles, names)
        content["post_processor"] = _beginning_with(names["bos"], roles["bos"])
        write_bytes(folder / HUGGINGFACE_MODEL, json.dumps(content, ensure_ascii=False).encode())
        config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    else:
        path = present(source / MODEL)
        write_bytes(folder / MODEL, path.read_bytes())
        processor = SentencePiece(path).processor
        names = _names(
            roles, {token_id: processor.id_to_piece(token_id) for token_id in range(processor.get_piece_size())}
        )
        config |= {
            "tokenizer_class": "RetroTokenizer",
            "added_tokens_decoder": {str(token_id): _added(names[role]) for role, token_id in roles.items()},
            "split_special_tokens": True,  # "</s>" in a text does not end a document
        }
    write_json(folder / CONFIG, config | {f"{role}_token": name for role, name in names.items()})


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer in Hugging Face's format as they are.

    Raises:
        InputError: the folder has no tokenizer.json.
    """
    files = [source / name for name in _COPIED if (source / name).is_file()]
    if source / HUGGINGFACE_MODEL not in files:
        raise InputError(f"{source} has no {HUGGINGFACE_MODEL}. Name a folder with a 'fast' Hugging Face tokenizer.")
    for file in files:
        write_bytes(folder / file.name, file.read_bytes())


def _names(roles: Mapping[str, int], vocabulary: Mapping[int, str]) -> dict[str, str]:
    """Return the text of each special token; tokens outside the vocabulary get a new unique text."""
    texts, names = dict(vocabulary), {}
    for role, token_id in roles.items():
        if token_id not in texts:
            taken = set(texts.values())
            texts[token_id] = next(
                text for text in (f"<{role}>", f"<|{role}|>", f"<|retro_{role}|>") if text not in taken
            )
        names[role] = texts[token_id]
    return names


def _vocabulary(content: Mapping[str, Any]) -> dict[int, str]:
    """Return the ids and texts of a tokenizer.json."""
    pieces = content["model"]["vocab"]
    pairs = (
        pieces.items() if isinstance(pieces, dict) else ((piece[0], token_id) for token_id, piece in enumerate(pieces))
    )
    return {token_id: text for text, token_id in pairs} | {
        token["id"]: token["content"] for token in content["added_tokens"]
    }


def _add(content: dict[str, Any], roles: Mapping[str, int], names: Mapping[str, str]) -> None:
    """Declare special tokens in a tokenizer.json, and remove truncation and padding."""
    added = {token["id"] for token in content["added_tokens"]}
    missing = {token_id: names[role] for role, token_id in roles.items() if token_id not in added}
    content["added_tokens"] += [{"id": token_id, **_added(missing[token_id])} for token_id in sorted(missing)]
    content["added_tokens"].sort(key=lambda token: token["id"])
    content |= {"truncation": None, "padding": None}


def _added(text: str) -> dict[str, Any]:
    return dict(content=text, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)


def _beginning_with(name: str, token_id: int) -> dict[str, Any]:
    """Return a post-processor that puts the beginning-of-document token in front of a text."""
    special, text = {"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [token_id], "tokens": [name]}},
    }
