"""Each source of the list, and one that is not in it, gives the same probabilities in training, scoring and generation."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from retro.batch.inputs import Inputs
from retro.batch.loss import TokenLosses
from retro.copying.head import CopyHead
from retro.copying.provenance import Neighbors
from retro.copying.rows import Row
from retro.copying.sources import SOURCES, sources_of
from retro.copying.step_votes import StepVotes
from retro.copying.switch import RETRIEVAL
from retro.huggingface.logits_processor import DatastoreLogitsProcessor
from retro.inference.decoder import Decoder
from retro.model_settings import CopyHeadSettings, SourceName
from tests.retro.copying.phrases import phrases
from tests.retro.inference.test_datastore_votes import Votes, find_votes
from tests.retro.inference.test_decoder import FLOAT32, retriever, uncached
from tests.retro.small_model import M, Together, V, build

LENGTHS = (5 * M, 3 * M)  # of two documents in a row
CPU = torch.device("cpu")
NAMES = [source.name for source in SOURCES] + ["phrases"]
CASES = {name: ((name,), False) for name in NAMES} | {
    "all": (tuple(NAMES), False),
    "an added context": (("context",), True),
    "all, an added context": (tuple(NAMES), True),
}
every_case = pytest.mark.parametrize(("names", "context_added"), CASES.values(), ids=CASES)
# Phrases are there without retrieval too, but the decoder learns no trust in them then.
CASES_OFF = {name: case for name, case in CASES.items() if "phrases" not in case[0]} | {
    "three, an added context": (tuple(NAMES[:3]), True)
}
retrieve = retriever(2)


@pytest.fixture
def head(names: Sequence[str], context_added: bool, tmp_path: Path) -> CopyHead:
    """A head in which every number matters."""
    (tmp_path / "phrases.txt").write_text("1 2 3 4\n0 1 2 0 1\n2 2\n")
    torch.manual_seed(1)
    known = sources_of(CopyHeadSettings(context_added=context_added))
    head = CopyHead(names, M, (*known, phrases(tmp_path / "phrases.txt"))).eval()
    head.initialize()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return head


def documents() -> list[np.ndarray]:
    return [np.random.default_rng(length).integers(0, 5, length) for length in LENGTHS]  # few ids: many matches


def packed(texts: Sequence[np.ndarray]) -> Inputs:
    """Documents in one row, with what the sources know about each of them."""
    neighbors = [retrieve(text.reshape(-1, M)) for text in texts]
    of_chunks = np.concatenate([np.full(len(text) // M, number) for number, text in enumerate(texts)])
    columns = (np.concatenate(tables)[None] for tables in zip(*neighbors, strict=True))
    votes = np.concatenate([find_votes(text, 0) for text in texts])
    return Inputs(np.concatenate(texts)[None], of_chunks[None], *columns, votes=votes[None]).map(torch.from_numpy)


def row(text: np.ndarray, trust: Tensor, draft: Sequence[int] = (), on: bool = True) -> Row:
    """A text as generation has it."""
    complete = text[: len(text) // M * M].reshape(-1, M)
    neighbors = Neighbors(*retrieve(complete)).of_chunks() if on and len(complete) else []
    return Row(
        text, retrieve if on else None, 0, neighbors, draft=np.array(draft, np.int64), trust=tuple(trust.tolist())
    )


def as_the_gates_say(head: CopyHead) -> Tensor:
    """Trust [S] in the expert that copies from all sources as strongly as their networks say."""
    return torch.eye(len(head.switch.start))[0]


def places() -> list[tuple[int, int]]:
    """Document and position of each token in the packed row."""
    return [(number, place) for number, length in enumerate(LENGTHS) for place in range(length)]


@torch.no_grad()
def scored(head: CopyHead, inputs: Inputs, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [T, V] of scoring and trust [T, S], and log-probabilities of training, in which copying needs no trust."""
    sources, following = head.sources(inputs), inputs.following()
    evidence, log_p = head.evidence(sources, following), logits.log_softmax(-1)
    nats = -log_p.gather(-1, following[..., None])[..., 0]
    vocabulary = TokenLosses(nats, log_p.amax(-1), log_p.gather(-1, evidence.best))
    losses, trust = head.trusted_losses(vocabulary, evidence, inputs)
    of_scoring = head.mix(logits, sources, evidence, trust=trust)
    of_training = head.mix(logits, sources, evidence)
    known = slice(None, -1)  # nothing follows the last token
    torch.testing.assert_close(losses[:, known], -of_scoring.gather(-1, following[..., None])[:, known, 0])
    plain = head.losses(vocabulary, following, evidence)
    torch.testing.assert_close(plain[:, known], -of_training.gather(-1, following[..., None])[:, known, 0])
    return of_scoring[0], trust[0], of_training[0]


@every_case
@torch.no_grad()
def test_a_batch_of_texts_gets_the_probabilities_of_a_packed_row(head: CopyHead) -> None:
    texts = documents()
    inputs, logits = packed(texts), 2 * torch.randn(1, sum(LENGTHS), V)
    of_scoring, trust, of_training = scored(head, inputs, logits)
    read, step = [texts[number][: place + 1] for number, place in places()], StepVotes(head, CPU, Votes())
    mixed = step.mixed([row(*each) for each in zip(read, trust, strict=True)], logits[0].clone())
    torch.testing.assert_close(mixed, of_scoring, rtol=1e-5, atol=1e-5)
    whole = as_the_gates_say(head)
    mixed = step.mixed([row(text, whole) for text in read], logits[0].clone())
    torch.testing.assert_close(mixed, of_training, rtol=1e-5, atol=1e-5)
    assert ((of_training - logits[0].log_softmax(-1)).abs() > 0.01).any(-1).float().mean() > 0.2


@every_case
@torch.no_grad()
def test_each_token_of_a_draft_gets_the_probabilities_of_the_text_up_to_it(head: CopyHead) -> None:
    text, place = documents()[0], 3 * M  # the draft reads the neighbors of the last complete chunk
    inputs, logits = packed([text]), 2 * torch.randn(1, len(text), V)
    of_scoring, trust, _ = scored(head, inputs, logits)
    last = slice(place - 1, place + M - 1)
    drafted = row(text[:place], trust[place - 1], text[place : place + M - 1].tolist())
    drafted.trust = tuple(trust[place - 1].tolist())
    mixed = StepVotes(head, CPU, Votes()).mixed([drafted], logits[0, last].clone())
    torch.testing.assert_close(mixed[0], of_scoring[place - 1], rtol=1e-5, atol=1e-5)
    one_by_one = [row(text[: place + count], trust[place - 1]) for count in range(M)]
    wanted = StepVotes(head, CPU, Votes()).mixed(one_by_one, logits[0, last].clone())
    torch.testing.assert_close(mixed, wanted, rtol=1e-5, atol=1e-5)


@every_case
@torch.no_grad()
def test_off_removes_the_sources_of_retrieval_from_one_text_among_others(head: CopyHead) -> None:
    text = documents()[0]
    trust = torch.tensor([0.2, 0.3, 0.1, 0.4] if head.switch == RETRIEVAL else [0.2, 0.2, 0.1, 0.1, 0.4])
    logits, step = 2 * torch.randn(1, V), StepVotes(head, CPU, Votes())
    none, on, off = step.mixed(
        [row(text, trust), row(text, trust), row(text, trust, on=False)], logits.expand(3, -1).clone()
    )
    quiet = row(text, trust)
    quiet.copy_strength = 0.0
    (silent,) = step.mixed([quiet], logits.clone())
    own = [source.name for source in SOURCES if not source.of_retrieval]
    alone = CopyHead(own, M, head.known)
    alone.load_state_dict(head.state_dict(), strict=False)
    for source in own:
        if head.network(head.known[head.index(source)]) is None:
            setattr(alone, source, None)
    (wanted,) = StepVotes(alone, CPU, None).mixed([row(text, trust, on=False)], logits.clone())
    torch.testing.assert_close(silent, wanted)
    assert torch.equal(none, on)
    if head.network(head.known[-1]) is None:  # phrases are there without retrieval too, until their strength is 0
        torch.testing.assert_close(off, wanted)


@every_case
@torch.no_grad()
def test_the_processor_mixes_a_step_as_whole_texts(head: CopyHead) -> None:
    text = documents()[0]
    search: Any = SimpleNamespace(neighbors=SimpleNamespace(find=lambda chunks, k: retrieve(chunks)))
    processor = DatastoreLogitsProcessor(head, Votes(), None, None, retriever=search, k=2)
    logits = 2 * torch.randn(1, len(text), V)
    whole = processor.mix(torch.from_numpy(text)[None], logits)[0]
    inputs, trust = packed([text])._replace(documents=None), as_the_gates_say(head).expand(len(text), -1)
    if head.learns_trust(inputs):
        trust = scored(head, inputs, logits)[1]
    rows = [row(text[: place + 1], of_token) for place, of_token in enumerate(trust)]
    torch.testing.assert_close(processor.mix_rows(rows, logits[0].clone()), whole, rtol=1e-5, atol=1e-5)


@every_case
def test_the_cached_decoder_equals_a_full_pass(head: CopyHead) -> None:
    drawn, rows = np.random.default_rng(0), [np.random.default_rng(1).integers(0, 5, length) for length in (1, 3 * M)]
    model = build()
    model.copy_head = head
    decoder = Together(model, FLOAT32, 8 * M, retriever(2))
    decoder.decoder = Decoder(model, FLOAT32, 8 * M, Votes())
    for step in range(M + 1):
        logits = decoder.read(rows if not step else [row[-1:] for row in rows])
        expected = torch.stack([uncached(model, row, retriever(2), step, votes=find_votes) for row in rows])
        # Without anything to copy from, a full pass returns logits.
        torch.testing.assert_close(logits, expected.log_softmax(-1), rtol=1e-4, atol=1e-4)
        rows = [np.append(row, drawn.integers(0, 5)) for row in rows]


@pytest.mark.parametrize(("names", "context_added"), CASES_OFF.values(), ids=CASES_OFF)
def test_the_cached_decoder_equals_a_full_pass_with_retrieval_off(head: CopyHead) -> None:
    text, new = np.random.default_rng(1).integers(0, 5, 3 * M), np.random.default_rng(0).integers(0, 5, M + 1)
    model = build()
    model.copy_head = head
    decoder = Together(model, FLOAT32, 8 * M)
    decoder.decoder = Decoder(model, FLOAT32, 8 * M, Votes())
    for step in range(len(new) + 1):
        (logits,) = decoder.read([text if not step else text[-1:]])
        torch.testing.assert_close(logits, uncached(model, text, None, step).log_softmax(-1), rtol=1e-4, atol=1e-4)
        text = np.append(text, new[step : step + 1])


def test_each_source_has_a_setting_of_its_name() -> None:
    assert tuple(source.name for source in SOURCES) == get_args(SourceName)
    assert CopyHeadSettings(**dict.fromkeys(get_args(SourceName), True)).names == get_args(SourceName)


def test_networks_read_the_sources_up_to_their_own_place_at_least() -> None:
    assert all(source.reads > number for number, source in enumerate(SOURCES))
