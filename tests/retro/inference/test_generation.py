"""Generation is reproducible by seed and searches neighbors only at chunk boundaries."""

import numpy as np
import pytest
import torch

from indexing.store.errors import InputError
from retro.batch.inputs import Inputs
from retro.device import choose_placement
from retro.inference.decoder import Decoder
from retro.inference.generation import Batch, GeneratedToken, generate
from retro.inference.sampling import draw, with_penalties
from retro.inference.settings import GenerationSettings
from retro.model.retro import Retro
from retro.model_settings import AttentionSettings, EncoderSettings, ModelSettings, RetrievalSettings

M = 4
FLOAT32 = choose_placement("cpu", "float32")


@pytest.fixture(scope="module")
def model() -> Retro:
    torch.manual_seed(0)
    return Retro(
        ModelSettings(
            vocab_size=30,
            d_model=16,
            d_ffw=32,
            attention=AttentionSettings(num_heads=2, head_dim=8),
            num_layers=2,
            retrieval=RetrievalSettings(cca_layers=(1, 2)),
            encoder=EncoderSettings(d_model=16, d_ffw=16, num_heads=1, head_dim=16, num_layers=1),
            chunk_length=M,
        )
    ).eval()


def generate_pieces(
    model: Retro, prompts, retrieve=None, context=64, eos_id=-1, n=1, **settings
) -> list[list[GeneratedToken]]:
    """The generated pieces of each continuation."""
    settings = GenerationSettings(**{"max_tokens": 12, **settings})
    batch, rows = Batch(Decoder(model, FLOAT32, context), decode, eos_id), [[] for _ in range(len(prompts) * n)]
    for step in generate(batch, [np.array(prompt) for prompt in prompts], settings, [retrieve] * len(prompts), n=n):
        assert [piece.row for piece in step] == sorted(piece.row for piece in step)
        for piece in step:
            assert not rows[piece.row] or rows[piece.row][-1].finish_reason is None
            rows[piece.row].append(piece)
    return rows


def continue_prompt(model: Retro, prompt=(1, 5, 6), **options) -> list[int]:
    """The generated tokens of one prompt."""
    return [piece.token for piece in generate_pieces(model, [prompt], **options)[0]]


def decode(tokens) -> str:
    """One letter per token."""
    return "".join(chr(ord("A") + token) for token in tokens)


class RecordingRetrieve:
    """Returns neighbors filled with one token and records the requested chunks."""

    def __init__(self, token: int) -> None:
        self.token, self.asked = token, []

    def __call__(self, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.asked.extend(chunks.tolist())
        return np.full((len(chunks), 2, 2 * M), self.token), np.full((len(chunks), 2), 2 * M)


def test_equal_seeds_give_equal_tokens_and_other_seeds_others(model: Retro) -> None:
    assert continue_prompt(model, seed=1) == continue_prompt(model, seed=1)
    assert continue_prompt(model, seed=1, max_tokens=30) != continue_prompt(model, seed=2, max_tokens=30)


def test_temperature_zero_and_top_k_one_take_the_likeliest_token(model: Retro) -> None:
    tokens = [1, 5, 6]
    for token in continue_prompt(model, temperature=0):
        with torch.no_grad():
            assert token == int(model(Inputs(torch.tensor([tokens])))[0, -1].argmax())
        tokens.append(token)
    assert (
        continue_prompt(model, temperature=0)
        == continue_prompt(model, temperature=1.0, top_k=1)
        == continue_prompt(model, temperature=1.0, top_p=1e-6)
    )


def test_neighbors_affect_tokens_only_after_their_chunk_is_full(model: Retro) -> None:
    first, second = (
        continue_prompt(model, retrieve=RecordingRetrieve(token), max_tokens=1, prompt=(1, 2, 3)) for token in (7, 20)
    )
    assert first == second
    draws = {
        token: continue_prompt(model, retrieve=RecordingRetrieve(token), max_tokens=40, seed=3) for token in (7, 20)
    }
    assert draws[7][0] == draws[20][0]
    assert draws[7] != draws[20]


def test_the_end_of_document_token_ends_the_text(model: Retro) -> None:
    free = continue_prompt(model, temperature=0)
    assert continue_prompt(model, temperature=0, eos_id=free[3]) == free[: free.index(free[3]) + 1]


def test_invalid_settings_are_rejected(model: Retro) -> None:
    with pytest.raises(InputError, match="max_tokens"):
        GenerationSettings(max_tokens=0)
    for setting, value in (
        ("top_p", 0),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("seed", -1),
        ("stop", ("a", "")),
        ("min_p", 1.5),
        ("copy_strength", 1.1),
        ("copy_strength", -0.1),
        ("copy_strength", float("nan")),
        ("temperature", 101),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-38),
        ("repetition_penalty", 1e38),
        ("presence_penalty", -2.1),
        ("frequency_penalty", float("inf")),
        ("logit_bias", ((3, float("nan")),)),
        ("logit_bias", ((3, 100.1),)),
    ):
        with pytest.raises(InputError, match=setting):
            GenerationSettings(**{setting: value})


PROMPTS = [(1,), (1, 5, 6, 7, 8, 2, 3), (1, 2, 3), (1, 9, 9, 9), (1, 5, 6)]


def test_rows_stop_independently_with_a_reason(model: Retro) -> None:
    free = generate_pieces(model, PROMPTS, seed=1)
    eos_id = free[1][4].token
    rows = generate_pieces(model, PROMPTS, seed=1, eos_id=eos_id)
    assert len({len(row) for row in rows}) > 1
    for row, whole in zip(rows, free, strict=True):
        tokens = [piece.token for piece in whole]
        ends = eos_id in tokens
        assert [piece.token for piece in row] == tokens[: tokens.index(eos_id) + 1 if ends else None]
        assert [piece.finish_reason for piece in row[:-1]] == [None] * (len(row) - 1)
        assert row[-1].finish_reason == ("stop" if ends else "length")
        assert "".join(piece.text for piece in row) == decode(token for token in tokens[: len(row) - ends])


def test_a_stop_string_ends_its_row_and_is_not_returned(model: Retro) -> None:
    free = [decode(piece.token for piece in row) for row in generate_pieces(model, PROMPTS, seed=2)]
    stop = free[0][5:7]
    for row, text in zip(generate_pieces(model, PROMPTS, seed=2, stop=(stop, "never")), free, strict=True):
        place = text.find(stop)
        assert "".join(piece.text for piece in row) == (text if place < 0 else text[:place])
        assert row[-1].finish_reason == ("length" if place < 0 else "stop")
        assert len(row) == (len(text) if place < 0 else place + len(stop))


def test_log_probabilities_ignore_temperature_top_k_and_top_p(model: Retro) -> None:
    tokens = [1, 5, 6]
    for piece in generate_pieces(model, [tokens], temperature=0.3, top_k=2, logprobs=3)[0]:
        with torch.no_grad():
            log_p = model(Inputs(torch.tensor([tokens])))[0, -1].log_softmax(0)
        assert piece.log_probability == pytest.approx(float(log_p[piece.token]), abs=1e-4)
        assert [token for token, _ in piece.top] == log_p.topk(3).indices.tolist()
        assert [value for _, value in piece.top] == pytest.approx(log_p.topk(3).values.tolist(), abs=1e-4)
        tokens.append(piece.token)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"top_k": 0, "top_p": 1}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 2, "top_p": 1}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 0, "top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 0, "top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_k": 3, "top_p": 1, "temperature": 0.5}, [16 / 29, 9 / 29, 4 / 29, 0]),
        ({"top_k": 0, "top_p": 1, "temperature": 1e-320}, [1, 0, 0, 0]),
        ({"top_k": 0, "top_p": 1, "min_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 0, "top_p": 0.5, "min_p": 0.4}, [4 / 7, 3 / 7, 0, 0]),
    ],
)
def test_sampling_frequencies_match_the_probabilities(settings: dict, expected: list[float]) -> None:
    random = np.random.default_rng(0).random(4000, dtype=np.float32).tolist()
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(4000, -1)
    sampling = GenerationSettings(**{"temperature": 1.0, **settings})
    drawn = draw(logits, logits, [sampling] * 4000, random)
    shares = np.bincount([token for token, _, _ in drawn], minlength=4) / 4000
    assert shares == pytest.approx(expected, abs=0.03)
    assert (shares[np.array(expected) == 0] == 0).all()


def exact_probabilities(row: np.ndarray, settings: GenerationSettings) -> np.ndarray:
    """Probabilities [V] of sampling a token, in float64 from all logits: top-k, then top-p and min-p; equal logits by id."""
    logits = row.astype(np.float64) / settings.temperature
    order = np.argsort(-logits, kind="stable")[: settings.top_k or None]
    p = np.exp(logits[order] - logits[order[0]])
    p /= p.sum()
    kept = (np.cumsum(p) - p < settings.top_p) & (p >= settings.min_p * p[0])
    drawn = np.zeros(len(row))
    drawn[order] = np.where(kept, p, 0) / p[kept].sum()
    return drawn


SAMPLED = [
    {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
    for top_k in (0, 40)
    for top_p in (1.0, 0.9, 0.3)
    for min_p in (0.0, 0.05)
    for temperature in (0.8, 1.5)
]
WIDTHS = {"flat": 0.001, "usual": 3.0, "peaked": 12.0}
"""Standard deviations of logits. Top-p keeps most of a flat vocabulary."""


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("own", SAMPLED, ids=str)
def test_each_token_is_sampled_by_the_share_of_random_numbers_that_is_its_probability(own: dict, width: float) -> None:
    row = np.random.default_rng(1).normal(0, width, 200).astype(np.float32)
    sampling, random = GenerationSettings(**own), (np.arange(4000) + 0.5) / 4000
    logits = torch.from_numpy(row).expand(len(random), -1)
    tokens = [token for token, _, _ in draw(logits, logits, [sampling] * len(random), random.tolist())]
    expected = exact_probabilities(row, sampling)
    counts = np.bincount(tokens, minlength=len(row))
    assert (np.abs(counts - expected * len(random)) <= 1.01).all()
    assert not counts[expected == 0].any()


@pytest.mark.parametrize("top_p", [1e-300, 0.25, 0.5, 0.9, 1 - 2**-53])
def test_top_p_keeps_the_fewest_of_equally_likely_tokens_by_id(top_p: float) -> None:
    logits, random = torch.zeros(1000, 16), np.linspace(0, 1, 1000).tolist()
    drawn = draw(logits, logits, [GenerationSettings(temperature=1, top_k=0, top_p=top_p)] * 1000, random)
    assert {token for token, _, _ in drawn} == set(range(max(1, round(np.ceil(16 * top_p)))))


def test_a_row_gets_the_same_token_alone_and_among_rows_with_other_settings_and_logits() -> None:
    rng = np.random.default_rng(2)
    settings = [
        GenerationSettings(),
        GenerationSettings(temperature=0),
        *(GenerationSettings(**own) for own in SAMPLED),
    ]
    widths = rng.choice(list(WIDTHS.values()), (len(settings), 1))
    logits = torch.from_numpy(rng.normal(0, widths, (len(settings), 500)).astype(np.float32)).bfloat16().float()  # ties
    masked = torch.arange(500) >= 480
    for _ in range(10):
        random = rng.random(len(settings), np.float32).tolist()
        together = [token for token, *_ in draw(logits, logits, settings, random, masked)]
        alone = [
            draw(row[None], row[None], [own], [number], masked)[0][0]
            for row, own, number in zip(logits, settings, random, strict=True)
        ]
        assert together == alone
        assert max(together) < 480


@pytest.mark.parametrize("temperature", [0, 1e-320, 1, 100])
@pytest.mark.parametrize("top_k", [0, 2])
def test_every_row_has_a_token_to_sample_whatever_its_logits(temperature: float, top_k: int) -> None:
    inf, nan, huge = float("inf"), float("nan"), 3e38
    rows = [[inf] * 3, [-inf] * 3, [nan] * 3, [1, inf, -inf], [nan, 1, -inf], [-huge, huge, 0], [0.1, 0.2, 0.7]]
    logits = torch.tensor(rows)
    settings = [GenerationSettings(temperature=temperature, top_k=top_k, min_p=1, top_p=1e-9, logprobs=3)] * len(rows)
    for random in (0.0, 0.5, float(np.nextafter(np.float32(1), np.float32(0)))):
        tokens = [token for token, _, _ in draw(logits, logits, settings, [random] * len(rows))]
        assert set(tokens) <= {0, 1, 2}
        assert tokens[3:] == [1, 1, 1, 2]


def test_several_continuations_equal_those_with_consecutive_seeds_and_search_the_prompt_once(model: Retro) -> None:
    for options in ({"seed": 4}, {"seed": 5, "context": 2 * M, "max_tokens": 20}):
        retrieve = RecordingRetrieve(7)
        together = generate_pieces(model, PROMPTS[1:3], retrieve=retrieve, n=3, **options)
        expected = [
            continue_prompt(model, prompt, retrieve=RecordingRetrieve(7), **options | {"seed": options["seed"] + copy})
            for prompt in PROMPTS[1:3]
            for copy in range(3)
        ]
        assert [[piece.token for piece in row] for row in together] == expected
        assert retrieve.asked.count(list(PROMPTS[1][:M])) == 1


def test_penalties_act_on_what_was_generated_and_repetition_also_on_the_prompt() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]]).expand(2, -1)
    prompts, generated = [np.array([1]), np.array([3])], [[], [0, 0, 2]]

    def changed(**settings) -> list[list[float]]:
        return with_penalties(logits, [GenerationSettings(**settings)] * 2, prompts, generated).tolist()

    untouched = [2.0, -2.0, 1.0, 0.5]
    assert changed(presence_penalty=0.5) == [untouched, [1.5, -2.0, 0.5, 0.5]]
    assert changed(frequency_penalty=0.5) == [untouched, [1.0, -2.0, 0.5, 0.5]]
    assert changed(repetition_penalty=2.0) == [[2.0, -4.0, 1.0, 0.5], [1.0, -2.0, 0.5, 0.25]]
    assert changed(logit_bias=((3, 4.0), (0, -1.0))) == [[1.0, -2.0, 1.0, 4.5]] * 2
    assert logits.tolist() == [untouched] * 2


def test_a_biased_token_is_always_or_never_drawn_and_keeps_its_log_probability(model: Retro) -> None:
    always = generate_pieces(model, [(1, 5, 6)], logit_bias=((9, 100.0),), seed=1)[0]
    assert {piece.token for piece in always} == {9}
    likeliest = continue_prompt(model, temperature=0)[0]
    assert likeliest not in continue_prompt(model, logit_bias=((likeliest, -100.0),), max_tokens=40, seed=1)
    plain = generate_pieces(model, [(1, 5, 6)], logprobs=30)[0][0]
    assert always[0].log_probability == pytest.approx(dict(plain.top)[9])


def test_stop_tokens_end_the_text_and_the_end_of_document_can_be_ignored(model: Retro) -> None:
    free = generate_pieces(model, [(1, 5, 6)], seed=1, max_tokens=20)[0]
    token = free[6].token
    place = [piece.token for piece in free].index(token)
    for options in ({"stop_token_ids": (token,)}, {"eos_id": token}):
        row = generate_pieces(model, [(1, 5, 6)], seed=1, max_tokens=20, **options)[0]
        assert [piece.token for piece in row] == [piece.token for piece in free[: place + 1]]
        assert row[-1].finish_reason == "stop"
        assert row[-1].text == ""
    ignoring = generate_pieces(model, [(1, 5, 6)], seed=1, max_tokens=20, eos_id=token, ignore_eos=True)[0]
    assert [piece.token for piece in ignoring] == [piece.token for piece in free]
