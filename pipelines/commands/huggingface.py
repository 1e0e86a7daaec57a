"""What the verbs on models in Hugging Face's format do with their settings: a few lines of calls into the layers below."""

from dataclasses import dataclass
from pathlib import Path

from indexing.device import Precision
from indexing.store.errors import InputError
from pipelines.commands.model import check_target
from pipelines.terminal import echo, human_bytes


@dataclass(frozen=True)
class ImportOptions:
    """Read a decoder from a local folder in Hugging Face format and write it as one file, which then serves as CHECKPOINT. Of a
    folder that `retro export` has written it comes back as it was, and the other options mean nothing."""

    output: Path
    """The file, `NAME.safetensors`."""
    chunk_length: int = 64
    """Tokens of a chunk of the datastores that it is used with."""
    context: int = 0
    """Tokens that it sees at most in scoring and generation; 0 = as many as it was made for, up to 2,048."""
    precision: Precision = "auto"
    """Of matrix products in scoring and generation, as `train.precision`."""
    verify: bool = True
    """Compare its logits with those of `transformers`, where that is installed; both models are in memory at a time."""
    overwrite: bool = False
    """Replace the file if it exists."""


def import_(folder: str, options: ImportOptions) -> int:
    """`retro import FOLDER --output FILE.safetensors`."""
    from retro.checkpoints.single_file import write_exported
    from retro.huggingface.compare_logits import has_transformers, verify
    from retro.huggingface.export import is_exported, read_folder
    from retro.huggingface.import_folder import import_base, read_base

    if options.output.suffix != ".safetensors":
        raise InputError(
            f"output = {str(options.output)!r}: the name must end in .safetensors, by which such a file is known."
        )
    check_target(options.output, options.overwrite)
    if is_exported(Path(folder)):
        state, tensors = read_folder(Path(folder))
        write_exported(state, tensors, options.output)
        echo(f"{options.output}: {human_bytes(options.output.stat().st_size)}, fingerprint {state['fingerprint']}")
        return 0
    base = read_base(Path(folder), options.chunk_length)
    if options.verify and has_transformers():
        difference, largest = verify(base)
        echo(f"logits differ from transformers' by {difference:.2g} at most, the largest is {largest:.3g}")
    elif options.verify:
        echo("logits were not compared: transformers is not installed (pip install 'retro[transformer]')")
    import_base(base, options.output, options.context, options.precision)
    number = sum(tensor.numel() for tensor in base.tensors.values())
    echo(f"{options.output}: {base.family}, {number:,} parameters, {human_bytes(options.output.stat().st_size)}")
    if base.added_rows:
        echo(f"{base.added_rows} ids of its tokenizer had no rows: they have the mean of the others")
    return 0
