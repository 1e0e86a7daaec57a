"""`retro import FOLDER`: models in Hugging Face format."""

from pathlib import Path

from indexing.machine import Precision
from indexing.store.errors import InputError
from indexing.store.settings import settings
from pipelines.commands.model import check_target
from pipelines.terminal import echo, human_bytes


@settings
class ImportOptions:
    """Read a decoder from a local folder in Hugging Face format and write it as one file, which other verbs accept as
    CHECKPOINT. A folder that `retro export` wrote is restored exactly; the other options then have no effect."""

    output: Path
    """The file, `NAME.safetensors`."""
    chunk_length: int = 32
    """Chunk length of the datastores that the model will use; 32 is the default of `chunks.chunk_length`."""
    context: int = 0
    """Maximum number of tokens of context in scoring and generation; 0 = that of the model, up to 2,048."""
    precision: Precision = "auto"
    """Precision of matrix products in scoring and generation, as `train.precision`."""
    verify: bool = True
    """Compare logits with `transformers`, if that is installed. Both models are in memory at the same time."""
    overwrite: bool = False
    """Replace an existing file."""


def import_(folder: str, options: ImportOptions) -> int:
    """`retro import FOLDER --output FILE.safetensors`."""
    from retro.checkpoints.single_file import write_exported
    from retro.finetuning.chat_template import template_in
    from retro.huggingface.compare_logits import has_transformers, verify
    from retro.huggingface.export import is_exported, read_folder
    from retro.huggingface.import_folder import import_base, read_base

    if options.output.suffix != ".safetensors":
        raise InputError(f"output = {str(options.output)!r}: the file name must end in .safetensors.")
    check_target(options.output, options.overwrite)
    if is_exported(Path(folder)):
        state, tensors = read_folder(Path(folder))
        write_exported(state, tensors, options.output)
        echo(f"{options.output}: {human_bytes(options.output.stat().st_size)}, fingerprint {state['fingerprint']}")
        return 0
    base = read_base(Path(folder), options.chunk_length)
    if options.verify and has_transformers():
        difference, largest = verify(base)
        echo(
            f"logits differ from those of transformers by at most {difference:.2g}; the largest logit is {largest:.3g}"
        )
    elif options.verify:
        echo("logits were not compared: transformers is not installed (pip install 'retro[transformer]')")
    import_base(base, options.output, options.context, options.precision, template_in(Path(folder)))
    number = sum(tensor.numel() for tensor in base.tensors.values())
    echo(f"{options.output}: {base.family}, {number:,} parameters, {human_bytes(options.output.stat().st_size)}")
    if base.added_rows:
        echo(f"{base.added_rows} ids of the tokenizer had no rows; their rows are the mean of the others")
    return 0
