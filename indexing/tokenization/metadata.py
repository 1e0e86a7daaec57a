"""The properties of a tokenizer, in the folder that a datastore and a model share.

`read_meta` and `read_token_bytes` need only numpy, so that training can read a finished datastore's vocabulary without
the tokenizer library.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeInt

from indexing.store.artifact import intact, stored_record
from indexing.store.errors import InputError
from indexing.store.files import save_array, write_json
from indexing.store.remote import present
from indexing.store.schemas import LARGEST_VOCABULARY
from indexing.store.sharded_array import open_array
from indexing.tokenization.backends import TokenizerBackend

MODEL = "sentencepiece.model"
HUGGINGFACE_MODEL = "tokenizer.json"
SENTENCEPIECE_NAMES = ("tokenizer.model", "spiece.model", MODEL)  # of Llama, of T5, and of `retro export`
META = "meta.json"
TOKEN_BYTES = "token_bytes.npy"

END_OF_TEXT = "<|endoftext|>"  # ends documents in pretraining: GPT-2, Pythia, StarCoder, SmolLM, Qwen

# Difficult texts that test whether a tokenizer is lossless.
_PROBES = (
    "", "Plain words.", " leading, trailing ", "a  b   c", "don 't , do n't .", "1234567890", "ĊĠ", "\u2581 \u2581",
    "def f(x):\n\n    return x\t# tab\r\n", "\n\n\n", "中文，標點。", "Ｆｕｌｌ ﬁ ½ é e\u0301 \u00a0\u3000",
    "\U0001f642\U0001f469\u200d\U0001f467", "\x00\x7f\ufffd\ufeff", "<s></s><unk><pad> <0x0A> <|endoftext|> [CLS]",
)  # fmt: skip


@dataclass(frozen=True)
class TokenizerMeta:
    """The properties of a tokenizer that the datastore and the model need.

    Attributes:
        kind: as in the settings.
        vocab_size: ids are in [0, vocab_size).
        pad_id: fills the last chunk of a document. No text encodes to it, and it differs from bos_id and eos_id.
        bos_id, eos_id: begin and end of a document; equal if the model has only one of them, or begins a document after
            the end of the previous one.
        lossless: whether decode(encode(text)) == text for each of our difficult samples.
        added_bytes: UTF-8 bytes that encoding adds to every text: 1 if it puts a blank in front, as Llama 2's does.
            meta.json has this key only if it is not 0.
    """

    kind: str
    vocab_size: Annotated[int, Field(ge=1, le=LARGEST_VOCABULARY)]
    pad_id: NonNegativeInt
    bos_id: NonNegativeInt
    eos_id: NonNegativeInt
    lossless: bool
    added_bytes: Annotated[int, Field(ge=0, le=16)] = 0

    def __post_init__(self) -> None:
        for key in ("pad_id", "bos_id", "eos_id"):
            if getattr(self, key) >= self.vocab_size:
                raise InputError(
                    f"{key} = {getattr(self, key)}: should be below vocab_size, which is {self.vocab_size:,}."
                )

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


def write_metadata(folder: Path, kind: str, model: TokenizerBackend, special: Mapping[str, int | None]) -> None:
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
    encoded = [list(ids) for ids in model.encode_batch(list(_PROBES), 1)]
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
