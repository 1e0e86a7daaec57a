"""How `retro eval qa` asks its questions."""

from dataclasses import dataclass
from typing import Literal

from indexing.retrieval.results import Rerank
from indexing.store.errors import InputError


@dataclass(frozen=True)
class QaSettings:
    """How questions are asked."""

    k: int = 2
    """Neighbors of each chunk of a prompt with retrieval ON; 0 = ON is not measured."""
    prompt_passages: int = 2
    """Passages in an open-book prompt, the nearest chunks to the question with their continuations."""
    neighbor_passages: int = 0
    """Passages found for the question that all chunks read as neighbors, in the paper's prompt, on which `retro finetune`
    trains (paper: 20); 0 = not measured."""
    gold: bool = False
    """Measure these neighbors once more, with the documents in front that the questions name as `positive_ids`."""
    rerank: Rerank = "embeddings"
    """What the candidates for passages are ordered by."""
    shots: int = 0
    """Solved questions in front of each, not in the paper's prompt: the first of the file, which are not asked then."""
    max_questions: int = 0
    """Ask so many, the first of the file; 0 = all."""
    max_tokens: int = 24
    """Tokens of an answer, at most; it ends with its line."""
    language: Literal["auto", "en", "zh"] = "auto"
    """Of the prompts' words and of the measures; `auto`: that of most questions."""
    batch_size: int = 8
    """Prompts that are continued together."""
    seed: int = 0
    """Of the bootstrap over questions."""

    def __post_init__(self) -> None:
        least = {"k": 0, "prompt_passages": 0, "neighbor_passages": 0, "shots": 0, "max_questions": 0}
        for key, number in (least | {"max_tokens": 1, "batch_size": 1}).items():
            if getattr(self, key) < number:
                raise InputError(f"{key} = {getattr(self, key)}: must be at least {number}.")
        if self.gold and not self.neighbor_passages:
            raise InputError(
                "gold needs passages as neighbors: set neighbor_passages, for example --neighbor-passages 20."
            )
