"""The tokenizer of a GGUF file as a tokenizer.json, with the rules that the file names.

    tokenizer.ggml.model = gpt2 ──► tokens, merges, and the rule of `tokenizer.ggml.pre` that splits text before merges
    tokenizer.ggml.model = llama ─► SentencePiece: pieces, merged in the order of their scores, with a token for each byte

No rule is guessed: a name that is not in `_RULES` is refused. A wrong rule gives other ids without an error.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from indexing.store.errors import InputError
from indexing.store.files import write_bytes, write_json
from indexing.tokenization.backends import META_SYMBOL
from indexing.tokenization.metadata import HUGGINGFACE_MODEL

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (  # of GPT-4, Llama 3 and Qwen, which differ in the number of digits
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _WORDS.replace("DIGITS", r"\p{N}{1,3}"), _WORDS.replace("DIGITS", r"\p{N}")
_TEKKEN = (  # of Mistral Nemo
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")


@dataclass(frozen=True)
class _Rule:
    """How a byte-level tokenizer splits a text before merges.

    Attributes:
        splits: regular expressions; each splits the parts that the previous ones left, into matches and what is
            between.
        ignore_merges: a part that is a token is that token, whatever the merges.
        adds_bos: whether `add_bos_token` is true if the file does not have it.
        nfc: whether the text is normalized to NFC first.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    nfc: bool = False


_RULES = {
    "deepseek-coder": _Rule(_DEEPSEEK_CODER),
    "gpt-2": _Rule((_GPT2,)),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3"), _Rule((_LLAMA3,), ignore_merges=True, adds_bos=True)),
    "qwen2": _Rule((_QWEN2,), nfc=True),
    **dict.fromkeys(("refact", "smollm", "starcoder"), _Rule((r"\p{N}", _GPT2))),
    "tekken": _Rule((_TEKKEN,), ignore_merges=True, adds_bos=True),
}
"""By `tokenizer.ggml.pre`: the rules of llama.cpp's llama-vocab.cpp, if they are those of the models' own
tokenizer.json."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # tokenizer.ggml.token_type
_KEY = "tokenizer.ggml."


def write_tokenizer(file: Path, fields: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template of a GGUF file.

    Args:
        file: the file, for messages.
        fields: keys and values of its header.
        folder: output folder.

    Raises:
        InputError: a key is missing, contradicts another one, or has a value that is not supported.
    """
    header = _Header(file, fields)
    bos, eos, unk = (header.special(role) for role in ("bos", "eos", "unknown"))
    if header.model == "gpt2":
        rule = _RULES.get(str(header.get("pre"))) or header.refuse("pre", ", ".join(_RULES))
        tokenizer, adds_bos = _byte_level(header, rule), rule.adds_bos
    else:
        tokenizer, adds_bos = _sentencepiece(header, unk), True
    adds = {"bos": bos if header.flag("add_bos_token", adds_bos) else None}
    adds["eos"] = eos if header.flag("add_eos_token", False) else None
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = _added(header)
    content["post_processor"] = _around(adds, header.tokens)
    write_bytes(folder / HUGGINGFACE_MODEL, json.dumps(content, ensure_ascii=False).encode())
    names = {"bos": bos, "eos": eos, "unk": unk, "pad": header.special("padding")}
    config: dict[str, Any] = {
        f"{role}_token": header.tokens[token_id] for role, token_id in names.items() if token_id is not None
    }
    config |= {f"add_{role}_token": token_id is not None for role, token_id in adds.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", config)
    if isinstance(template := fields.get("tokenizer.chat_template"), str):
        write_bytes(folder / "chat_template.jinja", template.encode())


class _Header:
    """The keys `tokenizer.ggml.*` of a file, checked.

    Attributes:
        model: `gpt2` or `llama`.
        tokens: texts of the tokens, all different.
        types: type of each token.
    """

    def __init__(self, file: Path, fields: Mapping[str, Any]) -> None:
        self.file, self.fields = file, fields
        self.model = self.get("model")
        if self.model not in ("llama", "gpt2"):
            self.refuse("model", "llama, gpt2")
        if not self.get("tokens"):
            raise InputError(f"{file} has no tokenizer (tokenizer.ggml.tokens). Name a file with one.")
        self.tokens: list[str] = self.array("tokens", str)
        # llama.cpp's name for an empty token
        self.tokens = [text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(self.tokens)]
        if len(set(self.tokens)) < len(self.tokens):
            twice = next(before for before, after in pairwise(sorted(self.tokens)) if before == after)
            raise InputError(f"{file}: {_KEY}tokens has {twice!r} twice. Download the file again.")
        self.types = self.array("token_type", int) if "token_type" in self else [_NORMAL] * len(self.tokens)

    def __contains__(self, key: str) -> bool:
        return _KEY + key in self.fields

    def get(self, key: str) -> Any:
        return self.fields.get(_KEY + key)

    def array(self, key: str, kind: type) -> list[Any]:
        """Return an array with a value of one type for each token; `merges` has any number of values."""
        values = self.get(key)
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise InputError(f"{self.file}: {_KEY}{key} must be an array of type {kind.__name__}. {_AGAIN}")
        if key not in ("tokens", "merges") and len(values) != len(self.tokens):
            raise InputError(
                f"{self.file}: {_KEY}{key} has {len(values):,} values for {len(self.tokens):,} tokens. {_AGAIN}"
            )
        return values

    def special(self, role: str) -> int | None:
        """Return the id of a special token; None without one."""
        token_id = self.get(f"{role}_token_id")
        if token_id is not None and not (type(token_id) is int and 0 <= token_id < len(self.tokens)):
            self.refuse(f"{role}_token_id", f"an id below the number of tokens, {len(self.tokens):,}")
        return token_id

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "true, false")
        return default if value is None else value

    def refuse(self, key: str, accepted: str) -> NoReturn:
        found = repr(self.get(key))[:100] if key in self else "missing"
        raise InputError(f"{self.file}: {_KEY}{key} is {found}; accepted: {accepted}. {_FOLDER}")


_AGAIN = "Download the file again."
_FOLDER = "Import the model's folder in Hugging Face format instead."


def _byte_level(header: _Header, rule: _Rule) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    ids = {text: token_id for token_id, text in enumerate(header.tokens)}
    merges = []
    for merge in header.array("merges", str):
        cut = merge.find(" ", 1)  # a token can begin with a blank
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or not {left, right, left + right} <= ids.keys():
            raise InputError(
                f"{header.file}: {_KEY}merges has {merge!r}, which are not two tokens that give a token. {_AGAIN}"
            )
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=rule.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in rule.splits]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(header: _Header, unknown: int | None) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    if header.flag("remove_extra_whitespaces", False):
        header.refuse("remove_extra_whitespaces", "false")
    ids = {text: token_id for token_id, text in enumerate(header.tokens)}
    has_bytes = header.types.count(_BYTE) == 256
    if unknown is None and not has_bytes:
        header.refuse("unknown_token_id", "an id, because the file has no token for each byte")
    tokenizer = Tokenizer(
        models.BPE(
            ids,
            _merges(header, ids),
            unk_token=None if unknown is None else header.tokens[unknown],
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    prefix = header.flag("add_space_prefix", True)
    blanks = normalizers.Replace(" ", META_SYMBOL)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(META_SYMBOL), blanks] if prefix else [blanks])
    steps: list[Any] = [decoders.Replace(META_SYMBOL, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(header: _Header, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that give a normal piece, the piece with the highest score first."""
    scores = header.array("scores", float)
    normal = [token_id for token_id, kind in enumerate(header.types) if kind == _NORMAL]
    longer = [token_id for token_id in normal if len(header.tokens[token_id]) > 1]
    if len(longer) > 1 and len({scores[token_id] for token_id in longer}) == 1:
        raise InputError(
            f"{header.file}: {_KEY}scores are all equal, so that the order of merges is unknown. {_FOLDER}"
        )
    merges = []
    for token_id in sorted(longer, key=lambda token_id: (-scores[token_id], token_id)):
        text = header.tokens[token_id]
        pairs = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        merges += sorted((pair for pair in pairs if pair[0] in ids and pair[1] in ids), key=lambda pair: len(pair[0]))
    return merges


def _added(header: _Header) -> list[dict[str, Any]]:
    """Return the tokens that merges cannot give: control tokens, and user-defined ones, which a text can contain."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": token_id, "content": text, **flags, "special": kind != _USER_DEFINED}
        for token_id, (text, kind) in enumerate(zip(header.tokens, header.types, strict=True))
        if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED)
    ]


def _around(adds: Mapping[str, int | None], tokens: list[str]) -> dict[str, Any] | None:
    """Return a post-processor that puts `bos` in front of a text and `eos` behind it; None if the file adds neither."""
    used = {role: token_id for role, token_id in adds.items() if token_id is not None}
    if not used:
        return None
    token = {role: {"SpecialToken": {"id": tokens[token_id], "type_id": 0}} for role, token_id in used.items()}
    before, after = ([token[role]] if role in token else [] for role in ("bos", "eos"))
    texts: list[Any] = [{"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B")]
    return {
        "type": "TemplateProcessing",
        "single": [*before, texts[0], *after],
        "pair": [*before, *texts, *after],
        "special_tokens": {
            tokens[token_id]: {"id": tokens[token_id], "ids": [token_id], "tokens": [tokens[token_id]]}
            for token_id in used.values()
        },
    }
