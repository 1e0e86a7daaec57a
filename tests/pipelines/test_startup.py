"""Help and error messages are printed without importing slow libraries."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.cli.main import VERBS

HEAVY = {"torch", "faiss", "ray", "transformers", "autofaiss", "matplotlib", "pyarrow", "sentencepiece", "fastapi"}

PROGRAM = """
import contextlib, io, json, sys
from pipelines.cli.main import main

heavy, *commands = json.loads(sys.argv[1])
for arguments in commands:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            status = main(arguments)
        except SystemExit as ended:
            status = ended.code
    print(json.dumps([arguments, status, sorted(set(heavy) & set(sys.modules))]))
"""

MISTAKES = (
    ["serch", "datastore", "text"],
    ["search"],
    ["search", "datastore", "text", "--kk", "3"],
    ["search", "datastore", "text", "--k", "three"],
    ["train", "missing.toml"],
    ["train", "--train.lr"],
    ["plan", "train", "--devices", "0"],
    ["eval", "perplexity", "run", "--k", "0"],
    ["eval", "qa", "run", "questions.jsonl", "--gold"],
    ["generate", "run", "--max-tokens", "0"],
    ["serve", "datastore", "--port", "70000"],
    ["export", "run"],
    ["demo", "--minutes", "0"],
    ["search", "nowhere", "text"],
    ["eval", "perplexity", "nowhere"],
    ["inspect", "nowhere"],
)


def test_help_and_error_messages_import_no_slow_library() -> None:
    helps = [["--help"], *([*verb.split(), "--help"] for verb in VERBS)]
    commands = json.dumps([sorted(HEAVY), *helps, *MISTAKES])
    process = subprocess.run([sys.executable, "-c", PROGRAM, commands], capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in process.stdout.splitlines()]
    assert answers == [[arguments, 0, []] for arguments in helps] + [[arguments, 2, []] for arguments in MISTAKES]


@pytest.mark.slow
def test_inference_imports_no_compiler(tiny_run: Path) -> None:
    # torch._dynamo takes longer to import than the rest of this package.
    commands = [
        ["generate", str(tiny_run), "--prompt", "The", "--max-tokens", "2"],
        ["eval", "perplexity", str(tiny_run)],
    ]
    program = [sys.executable, "-c", PROGRAM, json.dumps([["torch._dynamo"], *commands])]
    process = subprocess.run(program, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in process.stdout.splitlines()] == [[command, 0, []] for command in commands]
