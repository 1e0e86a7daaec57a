"""Any decoder of transformers that copies from a datastore, in EleutherAI's lm-eval harness: `--model hf-retro`.

    python -m retro.huggingface.lm_eval_model --model hf-retro --model_args pretrained=MODEL,datastore=DATASTORE --tasks TASKS

Importing this module registers the model. It is lm-eval's own `hf` with `DatastoreLogitsProcessor`: all arguments of
`hf` are accepted.
"""

from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from indexing.store.errors import InputError
from retro.huggingface.logits_processor import DatastoreLogitsProcessor


@register_model("hf-retro")
class CopyingHFLM(HFLM):
    """lm-eval's `hf`, with retrieval ON or OFF.

    Args:
        datastore: folder or URL of a datastore that was made with the model's tokenizer.
        retrieval: `on` or `off`; `off` is `hf`.
        networks: see `DatastoreLogitsProcessor.open`.
        k: see there.
        copy_strength: for generated texts, see there.
        options: of `hf`.

    Raises:
        InputError: an argument is not accepted, or the datastore does not fit the model.
    """

    def __init__(
        self,
        datastore: str = "",
        retrieval: str | bool = "on",
        networks: str = "",
        k: int = 0,
        copy_strength: float = 1.0,
        **options: Any,
    ) -> None:
        on = {"on": True, "off": False, True: True, False: False}.get(retrieval)
        if on is None:
            raise InputError(f"retrieval = {retrieval!r}: accepted are on and off.")
        if on and not datastore:
            raise InputError("datastore is missing: name a datastore, or set retrieval=off.")
        super().__init__(**options)
        self.processor: DatastoreLogitsProcessor | None = None
        if on:
            self.processor = DatastoreLogitsProcessor.open(
                datastore, self.tokenizer, self.model, networks=networks, k=int(k), copy_strength=float(copy_strength)
            )

    def _model_call(self, inps: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        """Logits [B, T, V], mixed with what is copied."""
        logits: torch.Tensor = super()._model_call(inps, *others, **named)
        return logits if self.processor is None else self.processor.mix(inps, logits)

    def _model_generate(self, *inputs: Any, **options: Any) -> torch.Tensor:
        """Continue texts, with the processor."""
        if self.processor is not None:
            options["logits_processor"] = [self.processor]
        generated: torch.Tensor = super()._model_generate(*inputs, **options)
        return generated


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
