"""`Dockerfile` and `compose.yaml` name files, options, ports and folders that exist, and give the server no more than it needs."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from pipelines.cli.settings.load import leaf_types
from pipelines.cli.verbs.demo import DemoOptions
from pipelines.cli.verbs.serve import ServeOptions
from retro.server.app import router

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SERVICE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["retro"]
DATASTORE = "/srv/datastore"
ORDER = (ROOT / "Dockerfile").read_text().splitlines()


def instructions(name: str) -> list[str]:
    """The arguments of every instruction with this name in the Dockerfile, comments removed and lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
    return re.findall(rf"^{name} +(.*)$", text, flags=re.MULTILINE)


def options_of(command: list[str]) -> dict[str, str]:
    """Option → value of `serve DATASTORE --option value …`; asserts that `retro serve` has the options."""
    verb, datastore, *options = command
    assert (verb, datastore) == ("serve", DATASTORE)
    found = {name[2:].replace("-", "_"): value for name, value in zip(options[::2], options[1::2], strict=True)}
    assert found.keys() <= leaf_types(ServeOptions).keys()
    return found


def copied() -> set[str]:
    """Files and folders of the repository that the image is built from."""
    sources = [each.split()[:-1] for each in instructions("COPY") if not each.startswith("--from")]
    return {source for each in sources for source in each}


def test_the_image_is_built_from_all_packages_and_from_files_that_exist() -> None:
    packages = {each.removesuffix("*") for each in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages | {"pyproject.toml", PROJECT["project"]["readme"], "LICENSE"} == copied()
    assert all((ROOT / each).exists() for each in copied())


def test_only_copied_files_are_sent_to_the_builder() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == copied()


def test_the_image_has_a_python_that_the_project_accepts() -> None:
    version = dict(each.split("=") for each in instructions("ARG") if "=" in each)["PYTHON"]
    least, limit = re.findall(r"[\d.]+", PROJECT["project"]["requires-python"])
    assert int(least.split(".")[1]) <= int(version.split(".")[1]) < int(limit.split(".")[1])


def test_the_image_runs_the_command_line_as_an_ordinary_user() -> None:
    assert [json.loads(each) for each in instructions("ENTRYPOINT")] == [["retro"]]
    assert "retro" in PROJECT["project"]["scripts"]
    (user,) = instructions("USER")
    assert user != "0"
    assert any(f"useradd --uid {user} " in each for each in instructions("RUN"))


def test_the_image_compiles_where_the_server_looks_for_it() -> None:
    compiling = [number for number, each in enumerate(ORDER) if each == "RUN python -m pipelines.compile_ahead"]
    cache = [number for number, each in enumerate(ORDER) if each.startswith("ENV NUMBA_CACHE_DIR=")]
    (last_stage,) = [number for number, each in enumerate(ORDER) if each.startswith("COPY --from=build")]
    assert last_stage < cache[0] < compiling[0]
    assert (ROOT / "pipelines" / "compile_ahead.py").exists()


def test_the_default_command_can_be_reached_from_outside_the_container() -> None:
    (command,) = instructions("CMD")
    assert options_of(json.loads(command)) == {"host": "0.0.0.0"}
    assert options_of(SERVICE["command"])["host"] == "0.0.0.0"


def test_ports_and_the_health_check_are_those_of_the_server() -> None:
    assert instructions("EXPOSE") == [str(ServeOptions.port)]
    assert SERVICE["ports"] == [f"127.0.0.1:{ServeOptions.port}:{ServeOptions.port}"]
    (check,) = instructions("HEALTHCHECK")
    found = re.search(rf"http://127\.0\.0\.1:{ServeOptions.port}(/\w+)", check)
    assert found is not None
    assert found[1] in {getattr(route, "path", "") for route in router.routes}


def test_the_folders_are_mounted_read_only_where_the_command_reads_them() -> None:
    volumes = {each["target"]: each for each in SERVICE["volumes"]}
    assert volumes.keys() == {DATASTORE, options_of(SERVICE["command"])["checkpoint"]}
    for each in volumes.values():
        assert (each["type"], each["read_only"], each["bind"]) == ("bind", True, {"create_host_path": False})
    folders = {each["source"].removesuffix("}").partition(":-")[2] for each in volumes.values()}
    output = DemoOptions.output
    assert folders == {f"./{output}/datastore", f"./{output}/retro"}


def test_the_token_is_that_of_the_server() -> None:
    assert SERVICE["environment"] == [ServeOptions.token_env]


def test_the_server_has_time_to_stop_and_cannot_write() -> None:
    assert float(SERVICE["stop_grace_period"].removesuffix("s")) > ServeOptions.shutdown_seconds
    assert (SERVICE["init"], SERVICE["read_only"], SERVICE["cap_drop"]) == (True, True, ["ALL"])


def test_the_documentation_names_the_variables_and_the_arguments_of_the_build() -> None:
    page = (ROOT / "docs" / "how-to" / "serving" / "deploy.md").read_text()
    variables = set(re.findall(r"\$\{(\w+)", (ROOT / "compose.yaml").read_text())) | {ServeOptions.token_env}
    arguments = {each.partition("=")[0] for each in instructions("ARG")}
    assert variables | arguments == set(re.findall(r"^\| `([A-Z_]+)`", page, flags=re.MULTILINE))
