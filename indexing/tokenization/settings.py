"""Tokenizer of the datastore and the model."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from indexing.store.errors import InputError
from indexing.store.settings import settings

_SMALLEST_VOCABULARY = 320


@settings
class TokenizerSettings:
    """Tokenizer of the datastore and the model."""

    kind: Literal["bpe", "unigram", "sentencepiece", "huggingface"] = "bpe"
    """`bpe` and `unigram` are trained on the corpus. `sentencepiece` and `huggingface` are copied from `path`."""
    path: str = ""
    """An existing SentencePiece .model file, the tokenizer.json of a local Hugging Face tokenizer, or the folder of
    either."""
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
