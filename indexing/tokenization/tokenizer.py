"""Text to token ids and back: trained or existing SentencePiece models, and local Hugging Face tokenizers.

    texts ────────► train_sentencepiece ─┐
    a model file ─► install_tokenizer ───┴► model, meta.json, token_bytes.npy ─► Tokenizer.open ─► encode, decode

A trained tokenizer is lossless: it does not normalize, has a token for every byte, and has tokens for runs of blanks, tabs and
line ends. `read_meta` and `read_token_bytes` need only numpy, so that training can read a finished datastore's vocabulary without
the tokenizer library.
"""

import dataclasses
import io
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from indexing.progress import status
from indexing.store.artifact import intact, stored_record
from indexing.store.errors import InputError
from indexing.store.files import save_array, write_bytes, write_json
from indexing.store.remote import present
from indexing.store.settings import settings
from indexing.store.sharded_array import open_array
from indexing.tokenization.backends import META_SYMBOL, HuggingFace, SentencePiece, TokenizerBackend, read_object
from indexing.tokenization.pieces import pieces

MODEL = "sentencepiece.model"
HUGGINGFACE_MODEL = "tokenizer.json"
SENTENCEPIECE_NAMES = ("tokenizer.model", "spiece.model", MODEL)  # of Llama, of T5, and of `retro export`
META = "meta.json"
TOKEN_BYTES = "token_bytes.npy"

# SentencePiece learns no piece with tabs and no piece with several line ends, so runs of them are declared.
WHITESPACE_PIECES = [*("\n" * n for n in range(1, 5)), *("\t" * n for n in range(1, 5)), "\r\n", "\r\n\r\n"]
_FIXED_PIECES = 4 + 256 + len(WHITESPACE_PIECES)  # special tokens, bytes, whitespace
_SMALLEST_VOCABULARY = 320
_CHARACTER_COVERAGE = 0.9995
_TRAINING_PIECE = 1024  # characters per sampled piece: at most about 4 KB in UTF-8
# The last bits of the unigram trainer's sums depend on the number of threads, so the number is fixed.
_TRAINING_THREADS = 4

PIECE = 2**19  # characters of a piece of a long text
_LONG = 2 * PIECE  # longer texts are tokenized in pieces
_PIECES_AT_A_TIME = 4  # on several threads

_RESERVED = "\u2585"  # ▅: the trainer drops every text that contains it

_END_OF_TEXT = "<|endoftext|>"  # ends documents in pretraining: GPT-2, Pythia, StarCoder, SmolLM, Qwen

# Difficult texts that install_tokenizer uses to test whether a tokenizer is lossless.
_PROBES = (
    "", "Plain words.", " leading, trailing ", "a  b   c", "don 't , do n't .", "1234567890", "ĊĠ", "\u2581 \u2581",
    "def f(x):\n\n    return x\t# tab\r\n", "\n\n\n", "中文，標點。", "Ｆｕｌｌ ﬁ ½ é e\u0301 \u00a0\u3000",
    "\U0001f642\U0001f469\u200d\U0001f467", "\x00\x7f\ufffd\ufeff", "<s></s><unk><pad> <0x0A> <|endoftext|> [CLS]",
)  # fmt: skip


@settings
class TokenizerSettings:
    """Which tokenizer the datastore and the model use."""

    kind: Literal["bpe", "unigram", "sentencepiece", "huggingface"] = "bpe"
    """`bpe` and `unigram` are trained on the corpus. `sentencepiece` and `huggingface` are copied from `path`."""
    path: str = ""
    """An existing SentencePiece .model file, the tokenizer.json of a local Hugging Face tokenizer, or the folder of either."""
    vocab_size: Annotated[int, Field(ge=_SMALLEST_VOCABULARY, le=2**31)] = 8192
    """Maximum of tokens in a trained tokenizer. A small corpus gives fewer."""
    sample_bytes: PositiveInt = 32 * 2**20
    """Bytes of text to train on: a uniform sample of passages from all documents."""
    seed: NonNegativeInt = 0
    """Seed of the sample."""

    def __post_init__(self) -> None:
        if self.is_trained and self.path:
            raise InputError(
                f"tokenizer.path is {self.path!r}, but tokenizer.kind = '{self.kind}' is trained on the corpus. "
                "Set tokenizer.kind to 'sentencepiece' or 'huggingface', or remove the path."
            )
        if not self.is_trained and not self.path:
            raise InputError(
                f"tokenizer.path is empty, but tokenizer.kind = '{self.kind}' needs the path of its model."
            )

    @property
    def is_trained(self) -> bool:
        """True if `train_sentencepiece` trains it on the corpus; False if `install_tokenizer` copies it."""
        return self.kind in ("bpe", "unigram")


@dataclass(frozen=True)
class TokenizerMeta:
    """The properties of a tokenizer that the datastore and the model need.

    Attributes:
        kind: as in the settings.
        vocab_size: ids are in [0, vocab_size).
        pad_id: fills the last chunk of a document. No text encodes to it, and it differs from bos_id and eos_id.
        bos_id, eos_id: begin and end of a document; equal if the model has only one of them, or begins a document after the
            end of the previous one.
        lossless: whether decode(encode(text)) == text for each of our difficult samples.
        added_bytes: UTF-8 bytes that encoding adds to every text: 1 if it puts a blank in front, as Llama 2's does. meta.json
            has this key only if it is not 0.
    """

    kind: str
    vocab_size: int
    pad_id: int
    bos_id: int
    eos_id: int
    lossless: bool
    added_bytes: int = 0

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """The smallest type for all ids: uint16 or uint32."""
        return np.uint16 if self.vocab_size <= 2**16 else np.uint32


def read_meta(folder: Path) -> TokenizerMeta:
    """Read the properties of the tokenizer in `folder`.

    Raises:
        InputError: there is none.
    """
    if not present(folder / META).exists():
        raise InputError(
            f"{folder / META} is missing: {folder} holds no finished tokenizer. Run `retro index` to make it."
        )
    return stored_record(folder / META, TokenizerMeta)


def read_token_bytes(folder: Path) -> np.ndarray:
    """[vocab_size] uint16: UTF-8 bytes that each token adds to the text, 0 for special tokens."""
    return np.array(open_array(intact(folder / TOKEN_BYTES)))


def train_sentencepiece(texts: Iterable[str], settings: TokenizerSettings, folder: Path) -> None:
    """Train a model on a sample of `texts`, which are read once, and write it to `folder`.

    The same texts and settings give the same bytes on any number of cores.

    Raises:
        InputError: there is no text to train on.
    """
    assert settings.is_trained
    passages = TextSample(settings.sample_bytes, settings.seed)
    for text in texts:
        passages.add(text)
    if not (sample := passages.pieces()):
        raise InputError(
            "The corpus has no text to train a tokenizer on. Check the problems reported for corpus.paths."
        )
    counts = count_characters(sample)
    foreign = line_ends_for(counts, set(frequent_characters(counts, (settings.vocab_size - _FIXED_PIECES) // 2)))
    status("training on %s pieces of text", f"{len(sample):,}")
    model = run_trainer(
        [piece.translate(foreign) for piece in sample],
        model_type=settings.kind,
        vocab_size=settings.vocab_size,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        user_defined_symbols=WHITESPACE_PIECES,
        byte_fallback=True,
        allow_whitespace_only_pieces=True,
        split_digits=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / MODEL, model)
    trained = SentencePiece(folder / MODEL)
    _write_facts(folder, settings.kind, trained, trained.special_ids())


def run_trainer(sentences: list[str], **options: Any) -> bytes:
    """Train a SentencePiece model on sentences in which `line_ends_for` has replaced rare characters by line ends.

    The text is not normalized. `options` are additional options of the trainer.
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        # The last sentence gives the blank a token even if the corpus has none (Chinese). Otherwise SentencePiece would write
        # it as the three bytes of ▁. It also keeps the trainer from failing on an empty sample.
        sentence_iterator=iter([*sentences, " a"]),
        model_writer=model,
        hard_vocab_limit=False,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        max_sentence_length=2**20,
        num_threads=_TRAINING_THREADS,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


class TextSample:
    """A uniform sample of passages of up to 1024 characters from a stream of texts, `sample_bytes` in all.

    Every passage gets a random number, and the smallest are kept. So one pass is enough, and memory holds only the sample.
    """

    def __init__(self, sample_bytes: int, seed: int) -> None:
        self._limit = sample_bytes
        self._generator = np.random.default_rng(seed)
        self._kept: list[tuple[float, int, str, int]] = []  # a heap with the largest random number first
        self._total = self._number = 0

    def add(self, text: str) -> None:
        """Cut a text into passages and add them to the sample by chance."""
        import heapq

        pieces = [text[start : start + _TRAINING_PIECE] for start in range(0, len(text), _TRAINING_PIECE)]
        for piece, draw in zip(pieces, self._generator.random(len(pieces)).tolist(), strict=True):
            self._number += 1
            if self._total >= self._limit and draw >= -self._kept[0][0]:
                continue
            size = len(piece.encode(errors="replace"))
            heapq.heappush(self._kept, (-draw, self._number, piece, size))
            self._total += size
            while self._total - self._kept[0][3] >= self._limit:
                self._total -= heapq.heappop(self._kept)[3]

    def pieces(self) -> list[str]:
        """The passages sampled so far, in the order of the texts."""
        return [piece for _, _, piece, _ in sorted(self._kept, key=lambda item: item[1])]


def count_characters(pieces: Iterable[str]) -> Counter[str]:
    """Count the characters in texts that a tokenizer is trained on, without ▁, ▅ and blanks."""
    counts: Counter[str] = Counter()
    for piece in pieces:
        counts.update(piece)
    for character in (META_SYMBOL, _RESERVED, " "):
        counts.pop(character, None)
    return counts


def frequent_characters(counts: Counter[str], limit: int, known: Container[str] = ()) -> list[str]:
    """Choose the characters that get a token, the most frequent first.

    Together with the `known` characters, which are not returned, they cover 99.95% of the text. They are at most `limit`.
    """
    target = _CHARACTER_COVERAGE * counts.total()
    covered = sum(count for character, count in counts.items() if character in known)
    frequent: list[str] = []
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if character in known:
            continue
        if covered >= target or len(frequent) >= limit:
            break
        frequent.append(character)
        covered += count
    return frequent


def line_ends_for(counts: Counter[str], kept: Container[str]) -> dict[int, str]:
    """A table for `str.translate`: counted characters that are not kept, and those no trainer accepts, become line ends.

    SentencePiece fails if the vocabulary cannot hold all characters of the requested coverage, and accepts no coverage below
    98%. So the characters are chosen here. A line end separates texts and is not learned.
    """
    foreign = {ord(META_SYMBOL): "\n", ord(_RESERVED): "\n", **dict.fromkeys(range(0xD800, 0xE000), "\n")}
    return foreign | {ord(character): "\n" for character in counts if character not in kept}


def install_tokenizer(settings: TokenizerSettings, folder: Path) -> None:
    """Copy the tokenizer at `settings.path` to `folder`.

    Missing special tokens get new ids after the last one: padding always, begin and end of a document if the model has neither.
    If it has one of these, it serves as both. See `_adds_bos` for models that put no token in front of a text.

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
        _write_facts(folder, settings.kind, model, model.special_ids())
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
        special["bos"] = fast.control_tokens().get(_END_OF_TEXT, special.get("eos"))
    _write_facts(folder, settings.kind, fast, special)


def _adds_bos(model: HuggingFace, bos: int | None, folder: Path) -> bool:
    """True if the model's own tokenizer puts BOS in front of a text, as its settings say or as its tokenizer.json does.

    Other models have read documents one after another, so a document begins with the token that ends documents. This is
    `<|endoftext|>` if the tokenizer has it, since EOS of chat models is often the end of a turn.
    """
    stated = special_settings(folder).get("add_bos_token")
    return bos is not None and (stated if isinstance(stated, bool) else model.first_id() == bos)


def sentencepiece_file(folder: Path) -> Path | None:
    """Return the SentencePiece model of a folder in Hugging Face's format or of a datastore's tokenizer; None without one."""
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


def _write_facts(folder: Path, kind: str, model: TokenizerBackend, special: Mapping[str, int | None]) -> None:
    """Write meta.json and token_bytes.npy; `special` gives the model's ids for `pad`, `bos` and `eos`."""
    sizes = model.token_bytes()
    vocab_size = len(sizes)
    pad, bos, eos = (special.get(role) for role in ("pad", "bos", "eos"))
    bos, eos = (eos if bos is None else bos), (bos if eos is None else eos)
    if bos is None or eos is None:
        bos = eos = vocab_size
        vocab_size += 1
    if pad is None or pad in (bos, eos):
        pad = vocab_size
        vocab_size += 1
    token_bytes = np.zeros(vocab_size, dtype=np.uint16)
    token_bytes[: len(sizes)] = sizes
    token_bytes[[pad, bos, eos]] = 0
    encoded = model.encode_batch(list(_PROBES), 1)
    lossless = model.decode_batch(encoded, 1) == list(_PROBES)
    # If a text token served as padding, decode would drop it.
    lossless = lossless and not any({pad, bos, eos} & set(ids) for ids in encoded)
    meta = TokenizerMeta(kind, vocab_size, pad, bos, eos, lossless, _added_bytes(model, token_bytes))
    save_array(folder / TOKEN_BYTES, token_bytes)
    fields = dataclasses.asdict(meta)
    write_json(folder / META, fields if meta.added_bytes else {k: v for k, v in fields.items() if k != "added_bytes"})


def _added_bytes(model: TokenizerBackend, token_bytes: np.ndarray) -> int:
    """See `TokenizerMeta`. Several characters are tried, because those unknown to the model have no bytes."""
    texts = ["a", "1", "的"]
    encoded = model.encode_batch(texts, 1)
    return max(0, *(int(token_bytes[ids].sum()) - len(text.encode()) for text, ids in zip(texts, encoded, strict=True)))


class Tokenizer:
    """Encodes and decodes; opened from a folder that `train_sentencepiece` or `install_tokenizer` filled.

    Attributes:
        meta: its properties; `vocab_size`, `pad_id`, `bos_id`, `eos_id` and `dtype` are also attributes here.
        num_model_tokens: ids of the model itself; `vocab_size` also counts special tokens that were added after them.
        token_bytes: [vocab_size] uint16, UTF-8 bytes that each token adds to the text, 0 for special tokens. For a lossless
            tokenizer `token_bytes[encode(text)].sum()` is the size of the text. For others it is near that size plus
            `meta.added_bytes`.
        control_tokens: text and id of the model's tokens that no text encodes to, such as `<|im_end|>`.
    """

    def __init__(self, meta: TokenizerMeta, token_bytes: np.ndarray, model: TokenizerBackend, num_threads: int) -> None:
        self.meta = meta
        self.token_bytes = token_bytes
        self.vocab_size, self.dtype = meta.vocab_size, meta.dtype
        self.pad_id, self.bos_id, self.eos_id = meta.pad_id, meta.bos_id, meta.eos_id
        self.num_model_tokens = model.num_tokens()
        self.control_tokens = model.control_tokens()
        self._special = {meta.pad_id, meta.bos_id, meta.eos_id}
        self._model = model
        self._num_threads = num_threads

    @property
    def has_bos(self) -> bool:
        """False if a document begins with the token that ends the previous one."""
        return self.bos_id not in (self.eos_id, self.control_tokens.get(_END_OF_TEXT))

    @classmethod
    def open(cls, folder: Path, num_threads: int = -1) -> "Tokenizer":
        """Open the tokenizer in `folder`; `num_threads` is for encode_batch, -1 = one per core.

        Hugging Face tokenizers take their number of threads from the environment variable RAYON_NUM_THREADS instead.

        Raises:
            InputError: there is none, or the package that reads it is not installed.
        """
        meta = read_meta(folder)
        is_huggingface = meta.kind == "huggingface"
        path = intact(folder / (HUGGINGFACE_MODEL if is_huggingface else MODEL))
        model = HuggingFace(path) if is_huggingface else SentencePiece(path)
        return cls(meta, read_token_bytes(folder), model, num_threads)

    def encode(self, text: str) -> np.ndarray:
        """Token ids [tokens] of `dtype`, without begin and end of document. Lone surrogates count as U+FFFD."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of each text, as `encode`, on several threads."""
        if any(len(text) > _LONG for text in texts):
            return [self._encode_long(text) if len(text) > _LONG else self._encode([text])[0] for text in texts]
        return self._encode(texts)

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self._model.encode_batch([_without_surrogates(text) for text in texts], self._num_threads)
        return [np.fromiter(ids, dtype=self.dtype, count=len(ids)) for ids in encoded]

    def _encode_long(self, text: str) -> np.ndarray:
        return np.concatenate([*self.encode_blocks(text[i : i + PIECE] for i in range(0, len(text), PIECE))])

    def encode_blocks(self, blocks: Iterable[str]) -> Iterator[np.ndarray]:
        """Token ids of one long text that is given in blocks, in parts: together those of `encode`, in memory for a few pieces.

        With a SentencePiece model of the kind unigram they can differ from tokens of the whole text, which SentencePiece finds by
        sums in float32 that grow with the text.
        """
        cut = pieces(map(_without_surrogates, blocks), lambda texts: self._model.encode_batch(texts, 1), PIECE)
        while group := list(itertools.islice(cut, _PIECES_AT_A_TIME)):
            yield from self._encode(group)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids (an array or a list), without special tokens; incomplete characters become U+FFFD."""
        return self._model.decode_batch([[token for token in map(int, ids) if token not in self._special]], 1)[0]

    def decode_batch(self, ids: Sequence[np.ndarray]) -> list[str]:
        """The text of each row of token ids, as `decode`, on several threads."""
        special = self._special
        kept = [tokens if special.isdisjoint(tokens := row.tolist()) else _without(tokens, special) for row in ids]
        return self._model.decode_batch(kept, self._num_threads)


def _without(tokens: list[int], special: set[int]) -> list[int]:
    return [token for token in tokens if token not in special]


def _without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", "\ufffd", text)
    return text


def open_huggingface(folder: str) -> Tokenizer:
    """Open a tokenizer in Hugging Face's format as `install_tokenizer` installs it in a datastore, which raises the errors."""
    with tempfile.TemporaryDirectory() as installed:
        install_tokenizer(TokenizerSettings(kind="huggingface", path=folder), Path(installed))
        return Tokenizer.open(Path(installed))
