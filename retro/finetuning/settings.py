"""What fine-tuning is told, beside what training is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from indexing.retrieval.results import Rerank
from indexing.store.errors import InputError

ExampleFormat = Literal["instructions", "questions"]


@dataclass(frozen=True)
class FinetuneSettings:
    """Which examples a model is fine-tuned on, and how they are written."""

    examples: tuple[Path, ...] = ()
    """Files of examples, JSON Lines (also .gz, .zst)."""
    format: ExampleFormat = "instructions"
    """`instructions`: lines with "instruction", "input" (may be missing) and "output", or with "messages" of "role" and "content".
    `questions`: lines with "question" and "answers", whose passages are neighbors (paper, section 4.3)."""
    template: str = ""
    """Words of instructions and conversations: a Jinja chat template, or the folder of a Hugging Face tokenizer that has one;
    empty: plain words for base models, User: and Assistant:, in Chinese 用户： and 助手：."""
    language: Literal["auto", "en", "zh"] = "auto"
    """Of these words, and of those around questions and passages; `auto`: that of each example."""
    rerank: Rerank = "embeddings"
    """What the candidates for a question's passages are ordered by: `embeddings`, `bm25` or `hybrid`."""
    positives_first: bool = False
    """Let the documents of "positive_ids" stand before the passages that are found."""
    held_out: float = 0.05
    """Share of the examples that is not learned but measured, ON and OFF, every `train.eval_every` steps."""
    packed: bool = True
    """Put several examples into a row of `data.sequence_length` tokens, each from a chunk on and seeing itself alone; false: one.
    With `tuning.adapter` `prefix` or `prompt` always one: virtual tokens stand before a row."""
    epochs: float = 0.0
    """How often each example is learned, in the place of `train.steps`; 0: as many steps as that says."""

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise InputError(f"finetune.held_out = {self.held_out}: must be 0 or more, and below 1.")
        if self.epochs < 0:
            raise InputError(f"finetune.epochs = {self.epochs}: must be above 0, or 0 to take train.steps.")
