"""Where prompts begin: `generate` of a model tells the processors that read prompts with this model.

A logits processor sees token ids and scores. From these, a new prompt looks like the next token of the text before if
it is that text and one token more, and padding looks like a token of the text if both have one id. Only a call of
`generate` knows both.
"""

import types
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, runtime_checkable

_BEFORE = "_generate_without_prompt_starts"


@runtime_checkable
class ReadsPrompts(Protocol):
    """A processor that reads prompts with a model."""

    def reads_with(self, model: Any) -> bool:
        """Whether it reads prompts with this model."""

    def new_prompts(self, attention_mask: Any = None) -> AbstractContextManager[None]:
        """Read the texts of the next calls as new prompts and what is generated after them, until the context ends."""


def announce_prompts(model: Any) -> None:
    """Let `generate` of a model announce its prompts to those of its processors that read with this model.

    Both attributes are bound methods, so a copy of the model calls its own, and a pickled model has those of its class.
    """
    if hasattr(model, "generate") and getattr(model.generate, "__func__", None) is not generate:
        setattr(model, _BEFORE, model.generate)
        model.generate = types.MethodType(generate, model)


def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """See `generate` of transformers."""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list)]
    processors = [one for values in lists for one in values if isinstance(one, ReadsPrompts) and one.reads_with(self)]
    with ExitStack() as stack:
        for processor in processors:
            stack.enter_context(processor.new_prompts(kwargs.get("attention_mask")))
        return getattr(self, _BEFORE)(*args, **kwargs)
