"""Models in local folders, or on the Hugging Face Hub."""

from collections.abc import Sequence
from pathlib import Path

from indexing.store.errors import InputError

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "config.json", "*.jinja")


def local_folder(source: str, files: Sequence[str] = MODEL_FILES, key: str = "") -> Path:
    """The folder itself, or that of a model of the Hugging Face Hub, which is downloaded to the Hub's cache if
    necessary.

    Args:
        source: folder, or name on the Hub.
        files: globs of what is downloaded.
        key: the option that names it, for messages.

    Raises:
        InputError: it is neither.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    named = f"{key} {source}".strip()
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(source, allow_patterns=list(files)))
    except ImportError as error:
        raise InputError(
            f"{named} is not a folder. For models of the Hugging Face Hub: pip install 'retro[transformer]'"
        ) from error
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{named} is not a local folder{'' if key else ' or .gguf file'}, and cannot be fetched from the Hugging Face Hub ({reason}). "
            "Check the name and the network, or name a local folder."
        ) from error
