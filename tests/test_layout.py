"""The shape of the repository: imports from earlier rooms, public names and pins as agreed."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gpmil

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "gpmil"
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


def block(after: str) -> list[str]:
    """The lines of the first code block behind some words of docs/design.md."""
    return DESIGN.partition(after)[2].split("```")[1].removeprefix("text\n").splitlines()


ROOMS = [line.split()[0] for line in block("## Rooms")]


def modules_of_rooms() -> dict[str, list[str]]:
    """The modules of every room that is a folder, in the order of docs/design.md."""
    found: dict[str, list[str]] = {}
    for line in block("Inside the rooms:"):
        if line.endswith("/"):
            room = found.setdefault(line.removesuffix("/"), [])
        else:
            room.append(line.split()[0])
    return found


INSIDE = modules_of_rooms()
DOORS = {
    "heatmaps": "gpmil.show.heatmaps",
    "metrics": "gpmil.decide.metrics",
    "plots": "gpmil.show.plots",
    "qupath": "gpmil.show.qupath",
    "slides": "gpmil.show.slides",
}
# A module comes after what it may import; a room's own name (its __init__) after its modules.
ORDER = [
    "gpmil.__version__",
    *(
        f"gpmil.{name}"
        for room in ROOMS
        for name in (*(f"{room}.{module}" for module in INSIDE.get(room, ())), room)
    ),
    *(f"gpmil.{door}" for door in DOORS),
    "gpmil.__main__",
]
KNOW_NOTHING_OF_THE_COHORT = ("coupling", "fast", "process", "moments")

PUBLIC = [
    "AttentionMIL",
    "Bags",
    "MaxPoolMIL",
    "MeanPoolMIL",
    "PseudoLabelMIL",
    "VGPMIL",
    "VGPMILPR",
    "VGPMILPRI",
    "__version__",
    "load",
    "paper_settings",
    "read",
    "simulate",
]

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def dotted(path: Path) -> str:
    """src/gpmil/models/base.py -> gpmil.models.base; a package's __init__.py is the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str, package: str) -> set[str]:
    """Dotted names of gpmil that the source imports, inside functions too.

    `package` is what relative imports start from. `from gpmil import x` counts as gpmil.x.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                origin = ".".join([*base, *filter(None, [node.module])])
            names.update(f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            # importlib.import_module("gpmil.x"), __import__("gpmil.x")
            names.update(str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))
    return {name for name in names if name.split(".")[0] == "gpmil"}


def room_of(module: str) -> str:
    return module.split(".")[1]


def known(name: str) -> str | None:
    """The module that an imported name is or lies in; None where no room has it."""
    parts = name.split(".")
    tried = (".".join(parts[:k]) for k in range(len(parts), 1, -1))
    return next((one for one in tried if one in ORDER), None)


def faults(source: str, module: str, package: str) -> list[str]:
    """What is wrong with the imports of a module, in words."""
    if module not in ORDER:
        return [f"{module} has no place: add it to the listing of docs/design.md"]
    found = []
    for name in sorted(imported(source, package)):
        origin = known(name)
        if origin is None:
            found.append(f"{module} imports {name}: import from a module that has a place")
        elif origin in DOORS_IN_FULL:
            found.append(f"{module} imports {name}, a door for users")
        elif room_of(origin) == "data" and room_of(module) in KNOW_NOTHING_OF_THE_COHORT:
            found.append(f"{module} imports {name}, and should know arrays only")
        elif ORDER.index(origin) >= ORDER.index(module):
            found.append(f"{module} imports {name}, which comes after it")
    return found


DOORS_IN_FULL = {f"gpmil.{door}" for door in DOORS}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_come_from_earlier_rooms_and_modules(path):
    module = dotted(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    assert faults(path.read_text(encoding="utf-8"), module, package) == []


def test_the_design_page_lists_the_tree():
    listed = {name for name in ORDER if name != "gpmil.__version__"}
    assert listed == {dotted(path) for path in MODULES}
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize(("door", "room"), DOORS.items())
def test_users_find_modules_under_their_names(door, room):
    show = (
        f"import gpmil.{door} as a, {room} as b\n"
        "print(all(getattr(a, n) is getattr(b, n) for n in b.__all__), len(b.__all__) > 0)"
    )
    found = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "True"]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gpmil.coupling.operator", "from gpmil.data.bags import Bags"),
        ("gpmil.coupling.operator", "from gpmil import bags"),
        ("gpmil.coupling.operator", "from .bags import Bags"),
        ("gpmil.coupling.operator", "from . import bags"),
        ("gpmil.coupling.operator", "import gpmil.models.base as base"),
        ("gpmil.moments.ep", "from gpmil.data import graphs"),
        ("gpmil.data.graphs", "from gpmil.data.bags import Bags"),
        ("gpmil.models.base", "from ..show.plots import roc"),
        ("gpmil.cli.demo", "from gpmil.plots import roc"),
        ("gpmil.inference.solvers", "def f():\n    from gpmil.models import base"),
        ("gpmil.inference.solvers", "importlib.import_module('gpmil.show.report')"),
        ("gpmil.cli.demo", "import gpmil"),
        ("gpmil.cli.demo", "from gpmil import Bags"),
        ("gpmil.cli.demo", "from gpmil import *"),
        ("gpmil.utils", "import numpy"),
    ],
)
def test_a_forbidden_import_is_found(module, source):
    assert faults(source, module, package=module.rpartition(".")[0]) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gpmil.data.bags", "from gpmil.data.graphs import laplacian"),
        ("gpmil.data.bags", "from . import graphs"),
        ("gpmil.models.vgpmil_pr", "from .base import Model\nfrom ..data.bags import Bags"),
        ("gpmil.files.persistence", "from gpmil import __version__"),
        ("gpmil.cli.demo", "def f():\n    import gpmil.show.plots\n    import torch"),
    ],
)
def test_an_allowed_import_is_let_through(module, source):
    assert faults(source, module, package=module.rpartition(".")[0]) == []


def test_public_names_are_the_contract():
    assert sorted(gpmil.__all__) == PUBLIC


def test_nothing_else_is_public():
    # In a fresh interpreter: the shape checks of these tests add a name to every module.
    show = "import gpmil; print(*(f'{n}:{type(getattr(gpmil, n)).__name__}' for n in dir(gpmil)))"
    shown = subprocess.run(
        [sys.executable, "-c", show], capture_output=True, text=True, check=True
    ).stdout.split()
    submodules = {f"{name}:module" for name in (*ROOMS, *DOORS)}
    assert {
        item
        for item in shown
        if not item.startswith("_") and item.split(":")[0] not in PUBLIC and item not in submodules
    } == set()


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements() -> list[Requirement]:
    extras = project()["optional-dependencies"].values()
    lines = [*project()["dependencies"], *(line for extra in extras for line in extra)]
    return [r for r in map(Requirement, lines) if r.name != "gpmil"]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    named = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in named}


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_constraints_pin_every_requirement_within_its_range(requirement):
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_third_party_lists_every_dependency():
    text = (ROOT / "THIRD_PARTY.md").read_text(encoding="utf-8")
    missing = {r.name for r in requirements() if r.name not in text}
    assert missing == set()


@pytest.mark.parametrize(
    ("credit", "module"),
    [
        ("k-means", "sklearn.cluster"),
        ("PCA", "sklearn.decomposition"),
        ("folds", "model_selection"),
    ],
)
def test_third_party_credits_what_is_used(credit, module):
    text = (ROOT / "THIRD_PARTY.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith("| scikit-learn")]
    used = [p for p in MODULES if module in p.read_text()]
    assert (credit in row) == bool(used)


def test_contributing_says_what_the_targets_do():
    recipes = (ROOT / "Makefile").read_text(encoding="utf-8")
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `make (\w+)` \| (.*) \|$", table, flags=re.M))
    bodies = dict(re.findall(r"^(\w+):.*\n((?:\t.*\n)+)", recipes, flags=re.M))
    assert set(rows) <= set(bodies) and {"bench", "studies"} <= set(rows)
    assert "gpmil bench" in bodies["bench"] and "gpmil bench" in rows["bench"]
    assert "$(SCRIPTS)" in bodies["studies"] and "benchmarks/" in rows["studies"]
