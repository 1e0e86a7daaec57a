"""A mistake in settings names the key; settings and metadata are read without optional packages."""

import subprocess
import sys
from pathlib import Path

import pytest

from indexing.store.errors import InputError
from indexing.tokenization.settings import TokenizerSettings
from tests.indexing.tokenization.models import train


@pytest.mark.parametrize(
    ("options", "message"),
    [({"kind": "wordpiece"}, "kind"), ({"kind": "sentencepiece"}, r"tokenizer\.path is empty"),
     ({"path": "x.model"}, r"tokenizer\.path"), ({"vocab_size": 256}, "vocab_size = 256"),
     ({"sample_bytes": 0}, "sample_bytes")],
)  # fmt: skip
def test_invalid_setting_is_refused_with_its_key(options, message):
    with pytest.raises(InputError, match=message):
        TokenizerSettings(**options)


def test_settings_and_metadata_are_read_without_optional_packages(tmp_path):
    vocab_size = train(tmp_path).vocab_size
    program = (
        "import sys\n"
        "for name in ('sentencepiece', 'pyarrow', 'tokenizers', 'fsspec', 'zstandard'): sys.modules[name] = None\n"
        "from pathlib import Path; import indexing.corpus.scan; from indexing.tokenization.metadata import *\n"
        "from indexing.tokenization.settings import TokenizerSettings\n"
        f"folder = Path({str(tmp_path)!r}); TokenizerSettings(); indexing.corpus.scan.CorpusSettings()\n"
        "print(read_meta(folder).vocab_size, len(read_token_bytes(folder)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    assert run.stdout.split() == [str(vocab_size)] * 2
