"""A SentencePiece model as a tokenizer of transformers, with this project's encoding and decoding."""

import re
import shutil
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizer

from indexing.tokenization.backends import SentencePiece
from indexing.tokenization.metadata import MODEL


class RetroTokenizer(PreTrainedTokenizer):
    """Tokenizer with the datastore's ids; puts the beginning-of-document token in front of every text.

    `split_special_tokens` is on: the name of a special token in a text is tokenized as plain text.
    """

    vocab_files_names: ClassVar = {"vocab_file": MODEL}
    model_input_names: ClassVar = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file: str | None = None, **kwargs: Any) -> None:
        if vocab_file is None:
            raise ValueError(f"the tokenizer's folder has no {MODEL}. Export the checkpoint again.")
        self.vocab_file = vocab_file
        self.sentencepiece = SentencePiece(Path(vocab_file))
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        """Number of pieces of the model; `len(tokenizer)` also counts added tokens."""
        return self.sentencepiece.num_tokens()

    def get_vocab(self) -> dict[str, int]:
        """Return pieces and added tokens with their ids."""
        pieces = {self._convert_id_to_token(number): number for number in range(self.vocab_size)}
        return pieces | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        text = re.sub("[\ud800-\udfff]", "\ufffd", text)  # lone surrogates have no bytes
        return [self._convert_id_to_token(number) for number in self.sentencepiece.encode_batch([text], 1)[0]]

    def _convert_token_to_id(self, token: str) -> int:
        number: int = self.sentencepiece.processor.piece_to_id(token)
        return number

    def _convert_id_to_token(self, index: int) -> str:
        piece: str = self.sentencepiece.processor.id_to_piece(index)
        return piece

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Convert pieces to text; special tokens keep their names."""
        special, texts, run = self.added_tokens_encoder, list[str](), list[int]()
        for token in [*tokens, None]:
            if token is not None and token not in special:
                run.append(self._convert_token_to_id(token))
                continue
            texts += self.sentencepiece.decode_batch([run], 1)
            texts += [] if token is None else [token]
            run = []
        return "".join(texts)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Put the beginning-of-document token in front of one or two texts."""
        return [self.bos_token_id, *token_ids_0, *(token_ids_1 or ())]

    def create_token_type_ids_from_sequences(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Return zeros, one for each token."""
        return [0] * len(self.build_inputs_with_special_tokens(token_ids_0, token_ids_1))

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        """Return 1 for special tokens and 0 for others."""
        ids = token_ids_0
        if not already_has_special_tokens:
            ids = self.build_inputs_with_special_tokens(token_ids_0, token_ids_1)
        return [int(number in self.all_special_ids) for number in ids]

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        """Copy the model file to a folder."""
        target = Path(save_directory) / f"{filename_prefix + '-' if filename_prefix else ''}{MODEL}"
        if target.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, target)
        return (str(target),)
