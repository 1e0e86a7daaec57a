"""What each verb on models and runs does with its settings: a few lines of calls into the layers below."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.config import Config
from pipelines.datastore_verbs import inspect_datastore
from pipelines.progress import human_bytes, print_rows, progress
from pipelines.training import run_training, train_quietly
from retro.generation import GenerationSettings
from retro.loggers import as_line

log = logging.getLogger("retro")


def train(config: Config) -> int:
    """`retro train CONFIG`: in this process, in several that torchrun has started, or on Ray.

    Among several processes the first one speaks.
    """
    from pipelines.run_report import write_run_report
    from retro.checkpoint import latest
    from retro.processes import joined
    from retro.run import read_metrics

    if config.executor.train.workers:
        from pipelines.ray_train import train_on_ray

        train_on_ray(config)
    else:
        with joined() as rank:
            run_training(config, "train") if rank == 0 else train_quietly(config)
        if rank:
            return 0
    print(as_line(read_metrics(config.run)[-1]))
    print(f"checkpoint: {latest(config.run)}")
    write_run_report([config.run], config.run / "report.html")
    print(f"report: {config.run / 'report.html'}")
    return 0


@dataclass(frozen=True)
class ReportOptions:
    """What training runs did, on one page: curves, held-out figures, settings. Also of a run that still goes on."""

    out: str = ""
    """HTML file to write; empty: `report.html` in the run's folder, for several runs `comparison.html` in the first one's."""


def report(runs: list[str], options: ReportOptions) -> int:
    """`retro report RUN [RUN2 …]`."""
    from pipelines.run_report import write_run_report

    folders = [Path(run) for run in runs]
    path = Path(options.out) if options.out else folders[0] / ("comparison.html" if folders[1:] else "report.html")
    print_rows(write_run_report(folders, path))
    print(f"report: {path}")
    return 0


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a prompt, with retrieval at every chunk boundary."""

    prompt: tuple[str, ...] = ("",)
    """Texts to continue, all at once; an empty one: from the beginning of a document."""
    retrieval: bool = True
    """Whether finished chunks ask the datastore for neighbors."""
    k: int = 2
    """Neighbors of each chunk."""
    datastore: str = ""
    """Datastore to search; empty: the one of the training run."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` …"""
    generation: GenerationSettings = field(default_factory=GenerationSettings)


def generate(checkpoint: str, options: GenerateOptions) -> int:
    """`retro generate CHECKPOINT`."""
    from retro.language_model import LanguageModel

    language_model = LanguageModel.open(
        checkpoint, options.datastore or None, options.device, retrieval=options.retrieval
    )
    texts = generate_texts(language_model, options)
    print("\n───\n".join(prompt + text for prompt, text in zip(options.prompt, texts, strict=True)))
    return 0


def generate_texts(language_model: Any, options: GenerateOptions) -> list[str]:
    """The continuation of each prompt as text."""
    tokenizer = language_model.tokenizer
    prompts = [np.append(tokenizer.bos_id, tokenizer.encode(prompt)).astype(np.int64) for prompt in options.prompt]
    k = options.k if language_model.retriever is not None else 0
    texts = [""] * len(prompts)
    with progress("generate", total=len(prompts) * options.generation.max_tokens, unit="tokens") as advance:
        for pieces in language_model.generate(prompts, options.generation, k):
            for piece in pieces:
                texts[piece.row] += piece.text
            advance(len(pieces))
    return texts


@dataclass(frozen=True)
class InspectOptions:
    """What a datastore or a checkpoint holds."""


def inspect(path: str, options: InspectOptions) -> int:
    """`retro inspect DATASTORE|CHECKPOINT`."""
    from retro.checkpoint import locate

    if locate(Path(path)) is not None:
        return inspect_checkpoint(Path(path))
    return inspect_datastore(Path(path))


def inspect_checkpoint(path: Path) -> int:
    """Step, sizes, parameters and settings."""
    import torch

    from retro.checkpoint import open_checkpoint
    from retro.model import Retro
    from retro.presets import count_active_parameters, count_parameters

    opened = open_checkpoint(path)
    with torch.device("meta"):
        model = Retro(opened.model)
    rows = [["checkpoint", str(opened.path)], ["fingerprint", opened.fingerprint]]
    rows += [["step", f"{opened.step:,}"], ["tokens", f"{opened.tokens:,}"]]
    rows.append(
        ["parameters", f"{count_parameters(model):,} and {count_parameters(model, embeddings=True):,} with embeddings"]
    )
    if opened.model.num_experts:
        rows.append(["parameters of a token", f"{count_active_parameters(model):,}"])
    rows.append(["datastores", ", ".join(opened.settings["data"]["datastores"])])
    rows += [
        [f"{section}.{key}", str(value)] for section, values in opened.settings.items() for key, value in values.items()
    ]
    print_rows(rows)
    return 0


@dataclass(frozen=True)
class ExportOptions:
    """Write a checkpoint's weights, settings and fingerprints as one file, which then serves as CHECKPOINT too."""

    to: Path
    """The file, `NAME.safetensors`."""


def export(checkpoint: str, options: ExportOptions) -> int:
    """`retro export CHECKPOINT --to FILE.safetensors`."""
    from retro.checkpoint import export as write
    from retro.checkpoint import open_checkpoint

    opened = open_checkpoint(Path(checkpoint))
    write(opened, options.to)
    print(f"{options.to}: {human_bytes(options.to.stat().st_size)}, step {opened.step:,} of {opened.path}")
    return 0
