"""`retro import MODEL`: models in Hugging Face format, and GGUF files."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from indexing.machine import Precision
from indexing.store.errors import InputError
from indexing.store.settings import settings
from pipelines.cli.hub import local_folder
from pipelines.cli.verbs.model import check_target
from pipelines.terminal.output import echo
from pipelines.terminal.units import human_bytes

SUFFIX = ".gguf"


@settings
class ImportOptions:
    """Read a decoder and write it as one file, which other verbs accept as CHECKPOINT.

    MODEL is a local folder in Hugging Face format, a name on the Hugging Face Hub, or a `.gguf` file (Llama, Mistral,
    Qwen2, Qwen3), whose tokenizer is written to a folder next to the output; or a prefix of peft (PREFIX_TUNING), with
    the base that it names. A folder that `retro export` wrote is restored exactly; the other options then have no
    effect."""

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


def import_(source: str, options: ImportOptions) -> int:
    """`retro import MODEL --output FILE.safetensors`."""
    from retro.checkpoints.single_file import write_exported
    from retro.huggingface.export import is_exported, read_folder
    from retro.huggingface.gguf_file import write_folder
    from retro.huggingface.import_folder import WEIGHTS
    from retro.huggingface.peft_prefix import CONFIG, adapter_config

    if options.output.suffix != ".safetensors":
        raise InputError(f"output = {str(options.output)!r}: the file name must end in .safetensors.")
    check_target(options.output, options.overwrite)
    if source.endswith(SUFFIX):
        target = options.output.with_suffix("")
        if target.exists() and any(target.iterdir()) and not options.overwrite:
            raise InputError(
                f"{target}, the folder for the tokenizer, is not empty. Name another output, or set --overwrite."
            )
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=options.output.parent, prefix=f".{target.name}.") as work:
            stored_as = write_folder(Path(source), Path(work))
            _import(Path(work), target, options, stored_as)
            target.mkdir(exist_ok=True)
            for file in Path(work).iterdir():
                if file.name != WEIGHTS:
                    os.replace(file, target / file.name)
        echo(f"{target}: tokenizer; for a datastore: --tokenizer.kind huggingface --tokenizer.path {target}")
        return 0
    folder = local_folder(source)
    if (folder / CONFIG).is_file():
        base = local_folder(str(adapter_config(folder).values.get("base_model_name_or_path", "")))
        _import(base, base, options, prefix=folder)
        return 0
    if is_exported(folder):
        state, tensors = read_folder(folder)
        write_exported(state, tensors, options.output)
        echo(f"{options.output}: {human_bytes(options.output.stat().st_size)}, fingerprint {state['fingerprint']}")
        return 0
    _import(folder, folder, options)
    return 0


def _import(folder: Path, kept: Path, options: ImportOptions, stored_as: str = "", prefix: Path | None = None) -> None:
    """Import a folder in Hugging Face format, whose tokenizer is later found in `kept`, with the prefix of a folder of
    peft."""
    from retro.huggingface.compare_logits import has_transformers, verify
    from retro.huggingface.import_folder import import_base, read_base
    from retro.huggingface.peft_prefix import with_prefix
    from retro.inference.chat_template import template_in

    base = read_base(folder, options.chunk_length)
    if options.verify and has_transformers():
        difference, largest = verify(base)
        echo(
            f"logits differ from those of transformers by at most {difference:.2g}; the largest logit is {largest:.3g}"
        )
    elif options.verify:
        echo("logits were not compared: transformers is not installed (pip install 'retro[transformer]')")
    if prefix is not None:
        base = with_prefix(base, prefix)
    import_base(
        replace(base, folder=kept), options.output, options.context, options.precision, template_in(folder), stored_as
    )
    number = sum(tensor.numel() for tensor in base.tensors.values())
    weights = f"{number:,} parameters" + (f" ({stored_as})" if stored_as else "")
    echo(f"{options.output}: {base.family}, {weights}, {human_bytes(options.output.stat().st_size)}")
    if base.added_rows:
        echo(f"{base.added_rows} ids of the tokenizer had no rows; their rows are the mean of the others")
