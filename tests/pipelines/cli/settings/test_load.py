"""Settings: the command line overrides the file, the file overrides the defaults, a mistake gives one message."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from pydantic import Field, PositiveFloat

from indexing.store.errors import InputError
from indexing.store.settings import NOT_A_KEY, settings
from pipelines.cli.settings.load import load
from pipelines.cli.settings.toml_file import to_toml


@settings
class Inner:
    """Deep settings."""

    depth: int = 1
    """How deep."""


@settings
class Layer:
    """Settings of one layer."""

    width: int = 1
    """How wide."""


@settings
class Train:
    """How long a model learns."""

    steps: int = 10
    """Optimizer steps."""
    lr: PositiveFloat = 1.0
    """Peak learning rate."""
    compile: bool = False
    """Compile the model."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up."""
    layers: Annotated[tuple[int, ...], Field(max_length=3)] = (3, 6)
    """Some layers."""
    log_to: tuple[str, ...] = ()
    """More places."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Exactly two."""
    copies: bool | None = None
    """Copy, by default as another setting says."""
    limit: int | None = None
    """At most."""
    checksum: int = field(default=0, metadata=NOT_A_KEY)
    """Set by a program."""
    layer_sizes: Mapping[Literal["first", "last"], Layer] = field(default_factory=dict)
    """By name."""
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.steps > 1000 * self.lr:
            raise InputError(f"train.steps = {self.steps}: too many for train.lr = {self.lr}.")


@settings
class Settings:
    """Everything."""

    datastore: Path = Path("datastore")
    """The folder."""
    weights: tuple[float, ...] = ()
    """Shares."""
    train: Train = field(default_factory=Train)
    given: frozenset[str] = field(default=frozenset(), compare=False, metadata=NOT_A_KEY)
    """Keys that were set."""


def write(folder: Path, text: str) -> Path:
    path = folder / "a.toml"
    path.write_text(text, encoding="utf-8")
    return path


def load_text(folder: Path, text: str, *arguments: str) -> Settings:
    return load(Settings, write(folder, text), arguments, verb="train CONFIG")


def error_of(folder: Path, text: str, *arguments: str) -> str:
    with pytest.raises(InputError) as caught:
        load_text(folder, text, *arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--train.copies", True),
        ("--train.no-copies", False),
        ("--train.copies False", False),
        ("--train.copies true", True),
        ("--train.copies=true", True),
        ("--train.copies None", None),
        ("--train.copies none", None),
    ],
)
def test_a_switch_is_a_pair_of_options_or_takes_a_word(words: str, value: bool | None) -> None:
    loaded = load(Settings, None, ["--train.copies", *words.split(), "--train.steps", "2"], verb="train").train
    assert (loaded.copies, loaded.steps) == (value, 2)


def test_settings_without_file_and_arguments_are_the_defaults():
    assert load(Settings, None, [], verb="train") == Settings()


def test_command_line_overrides_the_file_and_the_file_the_default(tmp_path: Path):
    text = 'datastore = "from-file"\nweights = [1, 2.5]\n[train]\nlr = 3.5\nsteps = 20\nlayers = []\n'
    text += "[train.inner]\ndepth = 2\n"
    got = load_text(tmp_path, text, "--train.steps=30", "--train.compile", "--train.log_to", "tensorboard", "wandb")
    train = Train(steps=30, lr=3.5, compile=True, layers=(), log_to=("tensorboard", "wandb"), inner=Inner(2))
    assert got == Settings(Path("from-file"), (1.0, 2.5), train)
    assert type(got.train) is Train
    assert isinstance(got.weights[0], float)


def test_hyphens_equal_underscores_and_numbers_can_be_negative(tmp_path: Path):
    got = load_text(
        tmp_path, "[train]\ncompile = true\n", "--train.no_compile", "--train.log-to", "x", "--train.layers", "-1", "2"
    )
    assert got.train == Train(log_to=("x",), layers=(-1, 2))


def test_value_with_two_leading_hyphens_is_accepted_after_an_equals_sign():
    assert load(Settings, None, ["--datastore=--x"], verb="v").datastore == Path("--x")


def test_last_value_of_a_repeated_option_counts():
    assert load(Settings, None, ["--train.steps", "1", "--train.steps", "2"], verb="v").train.steps == 2


def test_text_none_means_no_value(tmp_path: Path):
    assert load_text(tmp_path, '[train]\nlimit = "None"\n').train.limit is None
    assert load_text(tmp_path, "[train]\nlimit = 3\n", "--train.limit", "None").train.limit is None


def test_a_table_of_settings_has_the_keys_of_each_name(tmp_path: Path):
    got = load_text(tmp_path, "[train.layer_sizes]\nfirst.width = 2\n", "--train.layer-sizes.last.width", "3")
    assert got.train.layer_sizes == {"first": Layer(2), "last": Layer(3)}
    assert got.given == {"train.layer_sizes.first.width", "train.layer_sizes.last.width"}
    assert "last" not in load_text(tmp_path, "[train.layer_sizes]\nfirst.width = 2\n").train.layer_sizes


def test_a_field_that_is_no_key_is_unknown_and_not_shown(tmp_path: Path, capsys):
    assert "unknown key train.checksum" in error_of(tmp_path, "[train]\nchecksum = 1\n")
    assert "checksum" not in to_toml(Settings(train=Train(checksum=1)))
    with pytest.raises(SystemExit):
        load(Settings, None, ["--help"], verb="train")
    shown = capsys.readouterr().out
    assert "--train.steps" in shown
    assert "checksum" not in shown
    assert "given" not in shown


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("\n[train]\nlrr = 1\n", 3, ["train.lrr", "Did you mean train.lr?"]),
        ("train.lrr = 1\n", 1, ["train.lrr"]),
        ("[train.inner]\n# depth = 1\ndetph = 1\n", 3, ["Did you mean train.inner.depth?"]),
        ("lr = 1\n", 1, ["unknown key lr", "Did you mean train.lr?"]),
        ("[train]\ndepth = 1\n", 2, ["Did you mean train.inner.depth?"]),
        ("[train]\nmax_to = 1\n", 2, ["Did you mean train.log_to?"]),
        ("[train.layer_sizes.middle]\n", 1, ["section train.layer_sizes.middle", "train.layer_sizes.first"]),
        ("[train.layer_sizes]\nfirst.widht = 1\n", 2, ["Did you mean train.layer_sizes.first.width?"]),
        ("[train.layer_sizes]\nfirst.width = 1.5\n", 2, ["train.layer_sizes.first.width = 1.5", "integer"]),
        ("[train]\nwarmup = 1\n", 2, ["train.warmup", "train: train.steps, train.lr, train.compile"]),
        ("# c\n[trian]\nlr = 1\n", 2, ["section trian", "Did you mean train?"]),
        ("[other]\n", 1, ["section other", "train"]),
        ("train = 3\n", 1, ["train = 3", "[train]"]),
        ("[[train]]\nlr = 3\n", 1, ["train = ", "[train]"]),
        ('[train]\nlr = "fast"\n', 2, ['train.lr = "fast"', "number"]),
        ('[train]\nlr = "1"\n', 2, ['train.lr = "1"', "number"]),
        ("[train]\nlr = -1\n", 2, ["train.lr = -1", "greater than 0"]),
        ("[train]\n\nsteps = 1.5\n", 3, ["train.steps = 1.5", "integer"]),
        ("[train]\nsteps = 1.0\n", 2, ["train.steps = 1.0", "integer"]),
        ("[train]\nsteps = true\n", 2, ["train.steps = true", "integer"]),
        ('[train]\ncompile = "yes"\n', 2, ['train.compile = "yes"', "boolean"]),
        ("[train]\nlayers = 3\n", 2, ["train.layers = 3", "array"]),
        ("[train]\nlayers = [1, 2.5]\n", 2, ["train.layers[1] = 2.5", "integer"]),
        ("[train]\nbetas = [1]\n", 2, ["train.betas[1]", "missing"]),
        ("[train]\nbetas = [1, 2, 3]\n", 2, ["train.betas = [1, 2, 3]", "at most 2"]),
        ('[train]\nschedule = "linear"\n', 2, ['train.schedule = "linear"', "'cosine' or 'wsd'"]),
        ("[train]\nlimit = 1.5\n", 2, ["train.limit = 1.5", "integer"]),
        ("[train] # c\nlr = 2026-01-01\n", 2, ["train.lr", "2026-01-01", "number"]),
        ("datastore = 1\n", 1, ["datastore = 1", "string"]),
        ("[train]\nlr = \n", 2, ["TOML"]),
        ("[train]\nlr = 1\nlr = 2\n", 3, ["TOML"]),
        ('[train]\nschedule = "wsd', 2, ["TOML"]),
        ("[train]\nsteps = 5000\n", 2, ["train.steps = 5000: too many for train.lr = 1.0"]),
    ],
)
def test_mistake_in_the_file_is_reported_with_file_line_key_and_accepted_values(
    tmp_path: Path, text: str, line: int, words: list[str]
):
    message = error_of(tmp_path, text)
    assert message.startswith(f"{tmp_path / 'a.toml'}:{line}: ")
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "text",
    [
        "[train]\nlr = " + "[" * 100_000,
        "[train]\nlr = " + "[" * 150 + "]" * 150,
        ".".join("a" * 2000) + " = 1",
        "a = " + "1" * 5000,
    ],
    ids=["open", "deep", "dots", "digits"],
)
def test_toml_that_is_nested_too_deeply_is_refused_at_once(tmp_path: Path, text: str):
    assert error_of(tmp_path, text).startswith(f"{tmp_path / 'a.toml'}")


def test_missing_file_and_binary_file_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"none\.toml"):
        load(Settings, tmp_path / "none.toml", [], verb="train")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        load(Settings, tmp_path / "binary", [], verb="train")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--train.lrr 1e-3", ["--train.lrr.", "Did you mean --train.lr?", "`retro train --help`"]),
        ("--xx.yy 1", ["--xx.yy.", "Accepted sections: train"]),
        ("--lr=1", ["--lr.", "--train.lr?"]),
        ("--train.log-too x", ["Did you mean --train.log-to"]),
        ("--train.warmup 1", ["--train.warmup", "train: --train.steps, --train.lr"]),
        ("--train.lr fast", ["--train.lr = fast", "number"]),
        ("--train.lr -2", ["--train.lr = -2", "greater than 0"]),
        ("--train.steps 1.5", ["--train.steps = 1.5", "integer"]),
        ("--train.schedule linear", ["--train.schedule = linear", "'cosine' or 'wsd'"]),
        ("--train.layers 1 x", ["--train.layers[1] = x", "integer"]),
        ("--train.betas 1", ["--train.betas[1]", "missing"]),
        ("--train.limit x", ["--train.limit = x", "integer"]),
        ("--train.copies maybe", ["--train.copies = maybe", "boolean"]),
        ("--train.lr", ["--train.lr", "missing"]),
        ("--train.lr --train.compile", ["--train.lr", "missing"]),
        ("--train.steps 1 2", ["'2'"]),
        ("--train.compile True x", ["'x'"]),
        ("--train.no-compile True", ["'True'"]),
        ("stray", ["'stray'"]),
        ("--train.steps 5000", ["train.steps = 5000: too many for train.lr = 1.0"]),
    ],
)
def test_mistake_on_the_command_line_is_reported_with_option_and_accepted_values(
    arguments: str, words: list[str], capsys
):
    with pytest.raises(InputError) as caught:
        load(Settings, None, arguments.split(), verb="train CONFIG")
    assert all(word in str(caught.value) for word in words), caught.value
    assert capsys.readouterr() == ("", "")


def test_relation_that_an_option_breaks_is_reported_with_the_file_but_without_a_line(tmp_path: Path):
    message = error_of(tmp_path, "[train]\nlr = 1\n", "--train.steps", "5000")
    assert message.startswith(f"{tmp_path / 'a.toml'}: train.steps = 5000")


@pytest.mark.parametrize("value", ["-1", '"fast"'])
def test_option_can_correct_an_invalid_value_in_the_file(tmp_path: Path, value: str):
    assert load_text(tmp_path, f"[train]\nlr = {value}\n", "--train.lr", "2").train.lr == 2


def test_missing_required_option_is_refused_and_the_file_can_set_it(tmp_path: Path):
    assert load(Required, write(tmp_path, 'name = "x"'), [], verb="v") == Required("x")
    with pytest.raises(InputError, match="--name"):
        load(Required, None, [], verb="v")


@settings
class Required:
    """A field without a default."""

    name: str


@settings
class Empty:
    """No settings at all."""


def test_settings_without_fields_accept_no_options():
    assert load(Empty, None, [], verb="doctor") == Empty()
    with pytest.raises(InputError, match="--x"):
        load(Empty, None, ["--x"], verb="doctor")


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda text: text != "None")
numbers = st.floats(allow_nan=False)
trees = st.builds(
    Settings,
    datastore=texts.map(Path),
    weights=st.lists(numbers, max_size=3).map(tuple),
    train=st.builds(
        Train,
        steps=st.integers(-(10**20), 1000),
        lr=st.floats(min_value=1, allow_nan=False),
        compile=st.booleans(),
        schedule=st.sampled_from(["cosine", "wsd"]),
        layers=st.lists(st.integers(), max_size=3).map(tuple),
        log_to=st.lists(texts, max_size=3).map(tuple),
        limit=st.none() | st.integers(),
        inner=st.builds(Inner, st.integers()),
    ),
)


@settings_of_hypothesis(max_examples=25, deadline=None)
@given(settings=trees)
def test_load_reads_the_same_settings_that_to_toml_wrote(tmp_path_factory: pytest.TempPathFactory, settings: Settings):
    path = tmp_path_factory.getbasetemp() / "resolved.toml"
    path.write_bytes(to_toml(settings).encode())
    assert load(Settings, path, [], verb="train") == settings


def test_to_toml_writes_sections_in_order():
    text = to_toml(Settings())
    assert text.startswith('datastore = "datastore"\nweights = []\n\n[train]\nsteps = 10\n')
    assert text.endswith('limit = "None"\n\n[train.layer_sizes]\n\n[train.inner]\ndepth = 1\n')
