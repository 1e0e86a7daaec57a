"""Settings: the command line overrides the file, the file overrides the defaults, a mistake gives one message."""

import subprocess
import sys
from dataclasses import field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from indexing.store.errors import InputError
from indexing.store.settings import settings
from pipelines.settings.load import load
from pipelines.settings.toml_file import as_plain, to_toml


@settings
class Inner:
    """Deep settings."""

    depth: int = 1
    """How deep."""


@settings
class Train:
    """How long a model learns."""

    steps: int = 10
    """Optimizer steps."""
    lr: float = 1e-3
    """Peak learning rate."""
    compile: bool = False
    """Compile the model."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up."""
    layers: tuple[int, ...] = (3, 6)
    """Some layers."""
    log_to: tuple[str, ...] = ()
    """More places."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Exactly two."""
    copies: bool | None = None
    """Copy, by default as another setting says."""
    limit: int | None = None
    """At most."""
    inner: Inner = field(default_factory=lambda: Inner(depth=7))

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise InputError(f"train.lr = {self.lr}: must be above 0.")
        if self.steps > 1000:
            raise ValueError("train.steps: too many.")


@settings
class Settings:
    """Everything."""

    datastore: Path = Path("datastore")
    """The folder."""
    weights: tuple[float, ...] = ()
    """Shares."""
    train: Train = field(default_factory=Train)


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
        (["--train.copies"], True),
        (["--train.no-copies"], False),
        (["--train.copies", "False"], False),
        (["--train.copies", "True"], True),
        (["--train.copies", "None"], None),
        (["--train.copies", "false"], False),
        (["--train.copies", "true"], True),
        (["--train.copies", "none"], None),
    ],
)
def test_a_switch_that_can_be_none_is_a_pair_of_options_or_takes_a_word(words: list[str], value: bool | None) -> None:
    loaded = load(Settings, None, ["--train.copies", *words, "--train.steps", "2"], verb="train").train
    assert (loaded.copies, loaded.steps) == (value, 2)


def test_settings_without_file_and_arguments_are_the_defaults():
    assert load(Settings, None, [], verb="train") == Settings()


def test_default_of_a_section_overrides_the_defaults_of_its_type():
    assert load(Settings, None, [], verb="train").train.inner.depth == 7


def test_command_line_overrides_the_file_and_the_file_the_default(tmp_path: Path):
    text = 'datastore = "from-file"\nweights = [1, 2.5]\n[train]\nlr = 3e-4\nsteps = 20\nlayers = []\n'
    text += "[train.inner]\ndepth = 2\n"
    got = load_text(tmp_path, text, "--train.steps=30", "--train.compile", "--train.log_to", "tensorboard", "wandb")
    train = Train(steps=30, lr=3e-4, compile=True, layers=(), log_to=("tensorboard", "wandb"), inner=Inner(2))
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


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("\n[train]\nlrr = 1\n", 3, ["unknown key train.lrr", "train.lr?", "steps, lr, compile"]),
        ("train.lrr = 1\n", 1, ["unknown key train.lrr"]),
        ("[train.inner]\n# depth = 1\ndetph = 1\n", 3, ["train.inner.depth?"]),
        ("lr = 1\n", 1, ["unknown key lr", "train.lr?", "datastore, weights"]),
        ("# c\n[trian]\nlr = 1\n", 2, ["unknown section trian", "train?", "Sections outside sections: train."]),
        ("train = 3\n", 1, ["section", "[train]"]),
        ('[train]\nlr = "fast"\n', 2, ['train.lr = "fast"', "a number"]),
        ("[train]\n\nsteps = 1.5\n", 3, ["train.steps = 1.5", "a whole number"]),
        ("[train]\nsteps = true\n", 2, ["train.steps = true", "a whole number"]),
        ('[train]\ncompile = "yes"\n', 2, ['train.compile = "yes"', "true or false"]),
        ("[train]\nlayers = 3\n", 2, ["train.layers = 3", "a list, each item a whole number"]),
        ("[train]\nlayers = [1, 2.5]\n", 2, ["train.layers = [1, 2.5]"]),
        ("[train]\nbetas = [1]\n", 2, ["train.betas = [1]", "a list of 2, each item a number"]),
        ("[train]\nwarmup = 1\n", 2, ["unknown key train.warmup. Keys of [train]: steps, lr, compile"]),
        ('[train]\nschedule = "linear"\n', 2, ['"cosine" or "wsd"']),
        ("[train]\nlimit = 1.5\n", 2, ['a whole number or "None"']),
        ("[train] # c\nlr = 2026-01-01\n", 2, ["train.lr = 2026-01-01", "a number"]),
        ("datastore = 1\n", 1, ["datastore = 1", "a path"]),
        ("[train]\nlr = \n", 2, ["not valid TOML"]),
        ('[train]\nschedule = "wsd', 2, ["not valid TOML"]),
        ("[train]\nlr = -1\n", 2, ["train.lr = -1.0: must be above 0"]),
        ("[train]\nsteps = 5000\n", 2, ["train.steps: too many"]),
    ],
)
def test_mistake_in_the_file_is_reported_with_file_line_key_and_accepted_values(
    tmp_path: Path, text: str, line: int, words: list[str]
):
    message = error_of(tmp_path, text)
    assert message.startswith(f"{tmp_path / 'a.toml'}:{line}: ")
    assert all(word in message for word in words), message


def test_missing_file_and_binary_file_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"none\.toml: No such file"):
        load(Settings, tmp_path / "none.toml", [], verb="train")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        load(Settings, tmp_path / "binary", [], verb="train")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train.lrr", "1e-3"], ["unknown option --train.lrr.", "--train.lr", "retro train CONFIG --help"]),
        (["--lr=1"], ["unknown option --lr.", "--train.lr?"]),
        (["--train.log-too", "x"], ["Did you mean --train.log-to"]),
        (["--train.lr", "fast"], ["--train.lr fast: accepted is a number."]),
        (["--train.steps", "1.5"], ["--train.steps 1.5: accepted is a whole number."]),
        (["--train.schedule", "linear"], ['--train.schedule linear: accepted is "cosine" or "wsd"']),
        (["--train.layers", "1", "x"], ["--train.layers 1 x: accepted is a list"]),
        (["--train.betas", "1"], ["--train.betas 1: accepted is a list of 2, each item a number"]),
        (["--train.warmup", "1"], ["unknown option --train.warmup. Options of train: --train.steps, --train.lr"]),
        (["--train.limit", "x"], ['--train.limit x: accepted is a whole number or "None"']),
        (["--train.copies", "maybe"], ["--train.copies maybe: accepted is true, false or none"]),
        (["--train.lr"], ["--train.lr: a value is missing: accepted is a number."]),
        (["--train.lr", "--train.compile"], ["--train.lr: a value is missing"]),
        (["--train.compile=true"], ["unexpected argument '--train.compile=true'", "switch"]),
        (["--train.steps", "1", "2"], ["unexpected argument '2'"]),
        (["--train.compile", "True"], ["unexpected argument 'True'", "switch"]),
        (["stray"], ["unexpected argument 'stray'"]),
    ],
)
def test_mistake_on_the_command_line_is_reported_with_option_and_accepted_values(
    arguments: list[str], words: list[str], capsys
):
    with pytest.raises(InputError) as caught:
        load(Settings, None, arguments, verb="train CONFIG")
    assert all(word in str(caught.value) for word in words), caught.value
    assert "│" not in str(caught.value)
    assert capsys.readouterr() == ("", "")


def test_invalid_option_is_reported_with_the_file_but_without_a_line(tmp_path: Path):
    assert error_of(tmp_path, "[train]\nlr = 1\n", "--train.lr", "-2").startswith(
        f"{tmp_path / 'a.toml'}: train.lr = -2.0"
    )
    with pytest.raises(InputError, match=r"^train\.lr = -2"):
        load(Settings, None, ["--train.lr", "-2"], verb="train")


def test_option_can_correct_an_invalid_value_in_the_file(tmp_path: Path):
    assert load_text(tmp_path, "[train]\nlr = -1\n", "--train.lr", "1").train.lr == 1


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
    with pytest.raises(InputError, match="unknown option --x"):
        load(Empty, None, ["--x"], verb="doctor")


def test_help_shows_each_option_with_its_text_and_the_default_from_the_file(tmp_path: Path, capsys):
    with pytest.raises(SystemExit) as caught:
        load_text(tmp_path, "[train]\nlr = 0.5\n", "--help")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for part in (
        "retro train CONFIG",
        "--train.lr",
        "Peak learning rate.",
        "0.5",
        "--train.inner.depth",
        "How deep.",
        "train options",
    ):
        assert part in shown


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda text: text != "None")
numbers = st.floats(allow_nan=False)
trees = st.builds(
    Settings,
    datastore=texts.map(Path),
    weights=st.lists(numbers, max_size=3).map(tuple),
    train=st.builds(
        Train,
        steps=st.integers(-(10**20), 1000),
        lr=st.floats(min_value=0, exclude_min=True, allow_nan=False),
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
    assert text.endswith('limit = "None"\n\n[train.inner]\ndepth = 7\n')


def test_as_plain_returns_values_that_json_can_represent():
    plain = as_plain(Settings(weights=(0.5,)))
    assert plain["datastore"] == "datastore"
    assert plain["weights"] == [0.5]
    assert plain["train"]["layers"] == [3, 6]
    assert plain["train"]["inner"] == {"depth": 7}


def test_importing_settings_and_progress_imports_no_slow_library():
    code = "import sys, pipelines.settings.load, pipelines.terminal; print({'torch', 'faiss', 'ray', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
