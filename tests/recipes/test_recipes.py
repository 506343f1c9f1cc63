"""Recipes and workflows: what they name exists, and what they repeat is repeated right."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from typer.main import get_command

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCKERFILE = (ROOT / "packaging" / "Dockerfile").read_text(encoding="utf-8")
APPTAINER = (ROOT / "packaging" / "gpmil.def").read_text(encoding="utf-8")
CONDA = (ROOT / "packaging" / "conda" / "meta.yaml").read_text(encoding="utf-8")
GITHUB = ROOT / ".github"
VERSIONS = ["3.11", "3.12", "3.13"]
ON_CONDA = {"torch": "pytorch", "matplotlib": "matplotlib-base"}


def workflow(name: str) -> dict:
    return yaml.safe_load((GITHUB / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))


def steps(name: str) -> str:
    """All commands of a workflow."""
    jobs = workflow(name)["jobs"].values()
    return "\n".join(step.get("run", "") for job in jobs for step in job["steps"])


def require_command(words: list[str]) -> None:
    """Refuse `gpmil` words that are no command, or options that the command does not have."""
    from gpmil.cli import app

    known = get_command(app).commands
    options = {name for parameter in known[words[0]].params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


# --- Containers -----------------------------------------------------------------------------------
def test_docker_runs_the_demo():
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.M)[1])
    words = json.loads(re.search(r"^CMD (.*)$", DOCKERFILE, re.M)[1])
    assert entry == ["gpmil"] == list(PROJECT["scripts"]) and words[0] == "demo"
    require_command(words)


def test_docker_copies_and_installs_what_there_is():
    copied = re.findall(r"^COPY (?!--from)(\S+) ", DOCKERFILE, re.M)
    assert copied and all((ROOT / name).exists() for name in copied)
    extras = re.search(r"gpmil-\*\.whl\)\[(.*?)\]", DOCKERFILE)[1]
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    left_out = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert not {"src", "pyproject.toml", "README.md", "LICENSE", "constraints.txt"} & set(left_out)


def test_apptainer_runs_the_demo():
    files = re.search(r"%files\n((?:    .*\n)+)", APPTAINER)[1].split("\n")
    assert all((ROOT / line.split()[0]).exists() for line in files if line)
    assert "set -- demo" in APPTAINER and 'exec gpmil "$@"' in APPTAINER
    for line in re.findall(r"apptainer run .*gpmil\.sif (.*)", APPTAINER):
        require_command(line.split())


def test_bases_are_a_python_that_gpmil_runs_on():
    bases = re.findall(r"^(?:FROM|From:) python:(\d\.\d+)", DOCKERFILE + APPTAINER, re.M)
    assert len(bases) == 3 and set(bases) <= set(VERSIONS)


# --- Conda ----------------------------------------------------------------------------------------
def test_conda_needs_what_pip_needs():
    plain = re.sub(r"{{.*?}}", "x", re.sub(r"{%.*?%}", "", CONDA))
    run = yaml.safe_load(plain)["requirements"]["run"]
    assert run[0].split() == ["python", PROJECT["requires-python"]]
    found = {name: ranges for name, _, ranges in (line.partition(" ") for line in run[1:])}
    wanted = [Requirement(line) for line in PROJECT["dependencies"]]
    assert set(found) == {ON_CONDA.get(one.name, one.name) for one in wanted}
    for one in wanted:
        assert set(found[ON_CONDA.get(one.name, one.name)].split(",")) == {
            str(part) for part in one.specifier
        }


# --- GitHub ---------------------------------------------------------------------------------------
def test_every_python_is_tested():
    said = [line.rsplit(" ", 1)[-1] for line in PROJECT["classifiers"] if ":: 3." in line]
    assert said == VERSIONS
    assert workflow("tests")["jobs"]["tests"]["strategy"]["matrix"]["python"] == VERSIONS
    assert workflow("wheels")["jobs"]["install"]["strategy"]["matrix"]["python"] == VERSIONS


def test_workflows_call_what_there_is():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    commands = "\n".join(steps(name) for name in ("tests", "wheels", "docs"))
    called = re.findall(r"make (\w+)", commands)
    assert set(called) == {"lint", "test", "docs"} <= targets
    for line in re.findall(r"gpmil ([a-z]+ --.*|doctor)$", commands, re.M):
        require_command(line.split())


@pytest.mark.parametrize("name", ["bug", "proposal"])
def test_issue_templates_ask(name):
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(form)
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    assert asked and all("id" in field and field["attributes"]["label"] for field in asked)
    assert any(field.get("validations", {}).get("required") for field in asked)


def test_install_page_names_every_extra():
    page = (ROOT / "docs" / "how-to" / "install.md").read_text(encoding="utf-8")
    assert all(f"`{extra}`" in page for extra in PROJECT["optional-dependencies"])
