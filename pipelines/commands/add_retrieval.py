"""`retro add-retrieval CHECKPOINT`: retrieval for a trained model, without training."""

from pathlib import Path

from pydantic import PositiveInt

from indexing.store.errors import InputError
from indexing.store.settings import settings
from pipelines.commands.model import check_target
from pipelines.terminal import echo, human_bytes, progress


@settings
class AddRetrievalOptions:
    """Add retrieval to a trained model without training. The model gets a copy head that reads neighbors, fitted with a few
    forward passes over training text. All its other weights stay the same, so retrieval OFF is the model as it was. The
    output is one file, which other verbs accept as CHECKPOINT."""

    output: Path
    """The file, `NAME.safetensors`."""
    datastore: str = ""
    """Datastore with neighbors, built with the model's tokenizer; the file names it as its own. Empty: the datastore of the
    training run."""
    k: PositiveInt = 4
    """Neighbors of each chunk in these passes. The file can be used with any number."""
    tokens: PositiveInt = 20_000
    """Number of tokens of training text to read."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` …"""
    overwrite: bool = False
    """Replace an existing file."""


def add_retrieval(path: str, options: AddRetrievalOptions) -> int:
    """`retro add-retrieval CHECKPOINT --output FILE.safetensors`."""
    from retro.checkpoints.checkpoint import open_checkpoint
    from retro.data.settings import DataSettings
    from retro.device import choose_inference_placement
    from retro.training import added_retrieval

    if options.output.suffix != ".safetensors":
        raise InputError(f"output = {str(options.output)!r}: the file name must end in .safetensors.")
    check_target(options.output, options.overwrite)
    checkpoint = open_checkpoint(Path(path))
    folder = options.datastore or checkpoint.folders[0]
    placement = choose_inference_placement(options.device, checkpoint.settings["train"]["precision"])
    with progress("add-retrieval", total=options.tokens, unit="tokens") as advance:
        fit = added_retrieval.add_retrieval(
            checkpoint,
            folder,
            options.output,
            placement,
            k=options.k,
            num_tokens=options.tokens,
            advance=advance,
        )
    echo(
        f"loss on {fit.num_tokens:,} tokens of training text: {fit.off:.3f} OFF, {fit.after:.3f} ON with {options.k} "
        "neighbors; `retro eval perplexity` measures held-out text"
    )
    echo(f"neighbors: {DataSettings(**checkpoint.neighbor_rules).neighbor_use.rule}")
    echo(f"{options.output}: {human_bytes(options.output.stat().st_size)}, datastore {folder}")
    return 0
