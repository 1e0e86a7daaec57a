"""Fine-tuning learns answers, also from passages, resumes bit for bit, and rejects incompatible settings."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.config import Config
from retro.adapters.settings import LoraSettings
from retro.checkpoints import checkpoint as checkpoints
from retro.checkpoints.checkpoint import load_model, open_checkpoint
from retro.checkpoints.tensor_files import index, read_tensors
from retro.device import choose_placement
from retro.evaluation.neighbor_prompts import NeighborPassage, QuestionFormat
from retro.finetuning import prepare as preparing
from retro.finetuning.settings import FinetuneSettings
from retro.inference.chat_template import ChatTemplate, Message
from retro.inference.decoder import Decoder
from retro.inference.generation import Batch, generate
from retro.inference.settings import GenerationSettings
from retro.model_settings import ModelSettings, updated
from retro.training.trainer import Outcome, train
from tests.conftest import tiny_config
from tests.retro.finetuning.examples import INSTRUCTIONS, run, with_finetune, write_lines
from tests.retro.training.runs import interrupt_after, losses, weights, with_train


@pytest.fixture
def config(tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore) -> Config:
    """Eight steps on instructions in packed rows."""
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=tiny_datastore.folder)
    examples = write_lines(tmp_path / "examples.jsonl", INSTRUCTIONS)
    return replace(
        config,
        model=replace(config.model, dropout=0.1),
        data=replace(config.data, sequence_length=128),
        finetune=FinetuneSettings((examples,), held_out=0.2),
    )


def test_a_resumed_run_equals_an_uninterrupted_one(config: Config, tmp_path: Path) -> None:
    straight = run(config)
    stopped = replace(config, run=tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        run(stopped, advance=interrupt_after(5 * 2 * 128))
    assert [path.name for path in checkpoints.finished(stopped.run)] == ["00000004"]
    resumed = run(stopped)
    assert weights(resumed) == weights(straight)
    assert losses(resumed) == losses(straight)
    # Held-out answers are scored ON and OFF; the best checkpoint has the lowest loss ON.
    measured = {line["step"]: line for line in straight.metrics if "held_out_loss_on" in line}
    assert list(measured) == [4, 8]
    for line in measured.values():
        assert line["held_out_loss_on"] != line["held_out_loss_off"]
        assert line["held_out_perplexity_on"] == pytest.approx(np.exp(line["held_out_loss_on"]))
    best = min(measured, key=lambda step: measured[step]["held_out_loss_on"])
    assert open_checkpoint(Path(f"{config.run}@best")).step == best


def test_epochs_determine_the_number_of_steps(config: Config) -> None:
    config = with_finetune(with_train(config, batch_size=2, warmup_steps=0), epochs=1.5, packed=False, held_out=0.0)
    outcome = run(config)
    assert outcome.metrics[-1]["step"] == math.ceil(1.5 * len(INSTRUCTIONS) / 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: with_finetune(c, held_out=0.1), r"finetune\.held_out was 0\.2, now 0\.1"),
        (lambda c: with_finetune(c, language="zh"), r"finetune\.language was 'auto', now 'zh'"),
        (lambda c: with_train(c, lr=1e-5), r"train\.lr was"),
    ],
)
def test_changed_settings_are_rejected_with_their_key(config: Config, change, words: str) -> None:
    run(with_train(config, steps=2, warmup_steps=1))
    with pytest.raises(InputError, match=words):
        run(with_train(change(config), steps=2, warmup_steps=1))


def test_a_run_resumes_only_with_the_same_examples_and_command(config: Config) -> None:
    config = with_train(config, steps=2, warmup_steps=1)
    first = run(config)
    (path,) = config.finetune.examples
    moved = path.rename(path.with_name("moved.jsonl"))
    again = with_finetune(config, examples=(moved,))
    assert weights(run(again)) == weights(first)
    with pytest.raises(InputError, match=r"it was one of `retro finetune`"):
        train(config.run, config.run_settings)
    write_lines(moved, INSTRUCTIONS[1:])
    with pytest.raises(InputError, match=r"the datastore has changed, or the examples"):
        run(again)


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("finetune", {"examples": ()}, r"finetune\.examples is empty"),
        ("data", {"max_overlap": 0.5}, r"data\.max_overlap = 0\.5: `retro finetune` has no use for it"),
        (
            "data",
            {"neighbor_source": "random"},
            r"data\.neighbor_source = 'random': `retro finetune` has no use for it",
        ),
        ("model", {"chunk_length": 8}, r"model\.chunk_length = 8, but .* has chunk_length = 16"),
    ],
)
def test_incompatible_settings_are_rejected_with_their_key(config: Config, section: str, change, words: str) -> None:
    with pytest.raises(InputError, match=words):
        run(replace(config, **{section: replace(getattr(config, section), **change)}))
    assert not (config.run / "metrics.jsonl").exists()


def test_training_an_adapter_keeps_the_base(config: Config, tiny_run: Path) -> None:
    pytest.importorskip("peft")
    config = with_train(config, steps=2, warmup_steps=1, init_from=str(tiny_run), lr=1e-2)
    train = replace(config.train, weights="none")
    config = replace(
        config, train=train, model=ModelSettings(preset="base", chunk_length=16), lora=LoraSettings(rank=8)
    )
    outcome = run(config)
    before, after = (read_tensors(index(open_checkpoint(path).weights)) for path in (tiny_run, outcome.checkpoint))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert set(before) < set(after)


def generate_answers(
    outcome: Outcome, prompts: list[np.ndarray], tokenizer: Tokenizer, given: tuple[np.ndarray, np.ndarray] | None
) -> list[str]:
    """Greedy answers of a trained model to prompts; each chunk of a prompt reads the neighbors given for it."""
    model = load_model(open_checkpoint(outcome.checkpoint), torch.device("cpu"))
    texts = []
    for row, prompt in enumerate(prompts):

        def retrieve(chunks: np.ndarray, row: int = row) -> tuple[np.ndarray, np.ndarray]:
            assert given is not None
            return np.stack([given[0][row]] * len(chunks)), np.stack([given[1][row]] * len(chunks))

        decoder = Decoder(model, choose_placement("cpu", "float32"), 64)
        settings = GenerationSettings(max_tokens=12, temperature=0)
        batch = Batch(decoder, tokenizer.decode, tokenizer.eos_id)
        pieces = generate(batch, [prompt], settings, [retrieve if given else None])
        texts.append("".join(piece.text for step in pieces for piece in step).strip())
    return texts


def test_a_few_instructions_are_memorized(config: Config, tmp_path: Path, tiny_datastore: Datastore) -> None:
    examples = [
        {"messages": [{"role": "user", "content": "left?"}, {"role": "assistant", "content": "right"}, {"role": "user", "content": "up?"}, {"role": "assistant", "content": "down"}]},
        {"instruction": "first?", "output": "last"},
        {"instruction": "第一？", "output": "第二"},
    ]  # fmt: skip
    config = with_train(config, steps=80, lr=1e-2, warmup_steps=5, eval_every=0, batch_size=1, checkpoint_every=80)
    config = replace(config, model=updated(config.model, {"dropout": 0.0, "num_layers": 2, "retrieval.cca_layers": ()}))
    outcome = run(with_finetune(config, examples=(write_lines(tmp_path / "few.jsonl", examples),), held_out=0.0))
    tokenizer = Tokenizer.open(tiny_datastore.folder / "tokenizer")
    asked = [
        [Message("user", "left?"), Message("assistant", "right"), Message("user", "up?")],
        [Message("user", "first?")],
        [Message("user", "第一？")],
    ]
    prompts = [ChatTemplate(tokenizer).prompt(messages) for messages in asked]
    assert generate_answers(outcome, prompts, tokenizer, None) == ["down", "last", "第二"]


def test_answers_found_only_in_passages_are_read_from_them(
    config: Config, tmp_path: Path, tiny_datastore: Datastore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All examples have the same question, so only the passage determines the answer."""
    words = ["model", "layer", "token", "index"]
    passages = [[NeighborPassage("Answers", f"it is the {word}")] for word in words]
    monkeypatch.setattr(preparing, "find_neighbor_passages", lambda retriever, questions, k, **options: passages)
    path = write_lines(tmp_path / "q.jsonl", [{"question": "which?", "answers": [word]} for word in words])
    config = with_train(config, steps=60, lr=1e-2, warmup_steps=5, eval_every=0, batch_size=4, checkpoint_every=60)
    config = with_train(config, precision="float32")
    model = updated(config.model, {"dropout": 0.0, "num_layers": 2, "retrieval.cca_layers": (1, 2)})
    config = replace(config, model=model, data=replace(config.data, sequence_length=48, k=1, retrieval_dropout=0.0))
    outcome = run(with_finetune(config, examples=(path,), format="questions", held_out=0.0, packed=False))
    assert losses(outcome)[-1][1] < 0.1
    tokenizer = Tokenizer.open(tiny_datastore.folder / "tokenizer")
    form = QuestionFormat(tokenizer, 16)
    given = [form.neighbors(each, 1) for each in passages[::-1]]
    prompts = [form.prompt("which?")] * 4
    both = np.stack([tokens for tokens, _ in given]), np.stack([lengths for _, lengths in given])
    assert generate_answers(outcome, prompts, tokenizer, both) == words[::-1]
    assert len(set(generate_answers(outcome, prompts, tokenizer, None))) == 1
