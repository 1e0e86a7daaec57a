"""`python -m pipelines.compile_ahead`: compile all loops that `retro serve` needs, into `NUMBA_CACHE_DIR`.

A container image is built with it. It indexes some files of Python's library, trains a tiny model for a step, and
starts a server with both: the server is ready after it has used everything once.
"""

import email
import subprocess
import sys
import tempfile
from pathlib import Path

from pipelines.cli.main import main

_SETTINGS = """
datastore = "datastore"
run = "run"

[corpus]
paths = ["{corpus}"]

[tokenizer]
vocab_size = 500

[model]
d_model = 32
d_ffw = 64
num_layers = 2
activation = "swiglu"
copy_head = {{context = true, neighbors = true, datastore = true}}

[model.retrieval]
cca_layers = [2]

[model.attention]
num_heads = 2
head_dim = 16

[data]
sequence_length = 128

[train]
steps = 1
batch_size = 1
device = "cpu"
"""


def compile_ahead(folder: Path) -> int:
    """Build a tiny datastore and model in a folder, and start a server with them. Returns an exit status."""
    file = folder / "settings.toml"
    file.write_text(_SETTINGS.format(corpus=Path(email.__file__).parent.as_posix() + "/*.py"))
    for verb in ("index", "train"):
        if status := main([verb, str(file), "--datastore", str(folder / "datastore"), "--run", str(folder / "run")]):
            return status
    served = ["serve", str(folder / "datastore"), "--checkpoint", str(folder / "run"), "--port", "0"]
    command = [sys.executable, "-m", "pipelines.cli", *served]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ready = any(line.startswith("ready: ") for line in server.stdout)  # reads up to this line
        server.terminate()
    return 0 if ready else 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(compile_ahead(Path(temporary)))
