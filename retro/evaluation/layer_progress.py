"""Progress inside of a batch: one batch of a real model takes a CPU up to a minute."""

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn

from indexing.progress import Advance


@contextlib.contextmanager
def counted_by_layer(layers: Iterable[nn.Module], tokens: int, advance: Advance) -> Iterator[None]:
    """Advance by the tokens of a batch while the block computes it: by an equal part after each layer, and by the rest at the end.

    Args:
        layers: modules that run one after the other. If they run more than once, only the first times count.
        tokens: of the batch.
        advance: receives numbers of tokens.
    """
    blocks, finished, counted = list(layers), 0, 0

    def after_layer(*_: object) -> None:
        nonlocal finished, counted
        finished = min(finished + 1, len(blocks))
        reached = tokens * finished // (len(blocks) + 1)  # the output layer comes last
        advance(reached - counted)
        counted = reached

    hooks = [block.register_forward_hook(after_layer) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    advance(tokens - counted)
