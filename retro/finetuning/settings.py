"""Settings of fine-tuning."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from indexing.retrieval.queries import Retrieval
from indexing.store.settings import settings

ExampleFormat = Literal["instructions", "questions"]


@settings
class FinetuneSettings:
    """Examples that a model learns, and their form as text."""

    examples: tuple[Path, ...] = ()
    """Files of examples, JSON Lines (also .gz, .zst)."""
    format: ExampleFormat = "instructions"
    """`instructions`: lines with "instruction", "input" (may be missing) and "output", or with "messages" of "role" and
    "content". `questions`: lines with "question" and "answers", whose passages are neighbors (paper, section 4.3)."""
    template: str = ""
    """Template of instructions and conversations: a Jinja chat template, or the folder of a Hugging Face tokenizer with
    one. Empty = plain words for base models: User: and Assistant:, in Chinese 用户： and 助手：."""
    language: Literal["auto", "en", "zh"] = "auto"
    """Language of these words, and of the words around questions and passages; `auto` = that of each example."""
    retrieval: Retrieval = "dense"
    """Search for the passages of a question: by embeddings (`dense`), by terms (`sparse`), or by both (`hybrid`)."""
    positives_first: bool = False
    """Put the documents of "positive_ids" before the passages that the search finds."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Fraction of the examples that is not learned, but measured with retrieval ON and OFF every `train.eval_every`
    steps."""
    packed: bool = True
    """Put several examples into a row of `data.sequence_length` tokens. Each starts at a chunk and attends to itself
    only. False = one example in a row."""
    epochs: NonNegativeFloat = 0.0
    """Passes over the examples, instead of `train.steps`; 0 = use `train.steps`."""
