"""Layer 2: the model, batches, trainer, evaluation and generation (imports neither faiss nor ray).

Three public names, described in docs/reference/python-api.md. They are imported on first use, so that `import retro`
loads nothing else.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retro.api.dataset import Dataset
    from retro.api.datastore import Datastore
    from retro.api.ngrams import NGrams

__all__ = ["Dataset", "Datastore", "NGrams"]


def __getattr__(name: str) -> object:
    """A public name, from its file in `retro/api`."""
    if name not in __all__:
        raise AttributeError(f"module 'retro' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"retro.api.{name.lower()}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
