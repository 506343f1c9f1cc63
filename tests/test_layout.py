"""The shape of the repository: imports from earlier rooms, public names and pins as agreed."""

import ast
import graphlib
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
# Modules that users import by name, and that say in __all__ what is theirs.
FOR_USERS = ["gpmil.distributed", "gpmil.io", "gpmil.models", "gpmil.simulate", *DOORS.values()]

MOST_LINES, MOST_LINES_OF_A_FUNCTION = 450, 45

PUBLIC = [
    "AttentionMIL",
    "Bags",
    "MaxPoolMIL",
    "MeanPoolMIL",
    "NominalMIL",
    "OrdinalMIL",
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


def package_of(path: Path) -> str:
    """What the relative imports of a module start from."""
    module = dotted(path)
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def imported(source: str, package: str) -> dict[str, str]:
    """Dotted names of gpmil that the source imports, inside functions too, and what it calls them.

    `package` is what relative imports start from. `from gpmil import x` counts as gpmil.x.
    """
    names: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name: alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                origin = ".".join([*base, *filter(None, [node.module])])
            names |= {f"{origin}.{alias.name}": alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            # importlib.import_module("gpmil.x"), __import__("gpmil.x")
            names |= {str(a.value): "" for a in node.args[:1] if isinstance(a, ast.Constant)}
    return {name: own for name, own in names.items() if name.split(".")[0] == "gpmil"}


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


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_uses(source: str, module: str, package: str) -> set[str]:
    """Private names of other modules that are imported, or read as an attribute of the module."""
    names = imported(source, package)
    found = {name for name in names if private(name.rpartition(".")[2])}
    called = {own: name for name, own in names.items() if name in ORDER}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and private(node.attr):
            origin = called.get(ast.unparse(node.value))
            found |= set() if origin is None else {f"{origin}.{node.attr}"}
    return {f"{module} uses {name}" for name in found}


def long_functions(source: str, module: str) -> set[str]:
    """Functions above the limit, docstring included, by their full names."""
    found: set[str] = set()

    def look(node: ast.AST, above: str) -> None:
        for inner in ast.iter_child_nodes(node):
            own = above
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own = f"{above}.{inner.name}"
                lines = inner.end_lineno - inner.lineno + 1
                if not isinstance(inner, ast.ClassDef) and lines > MOST_LINES_OF_A_FUNCTION:
                    found.add(own)
            look(inner, own)

    look(ast.parse(source), module)
    return found


def texts() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_come_from_earlier_rooms_and_modules(path):
    assert faults(path.read_text(encoding="utf-8"), dotted(path), package_of(path)) == []


def test_no_module_imports_itself_round_about():
    edges = {
        dotted(path): {known(name) for name in imported(text, package_of(path))} - {None}
        for path, text in texts().items()
    }
    assert len(edges["gpmil.cli"]) > 3 and len(edges["gpmil.viewer.app"]) > 3
    graphlib.TopologicalSorter(edges).prepare()  # CycleError names the modules of a cycle


def test_modules_keep_their_private_names_to_themselves():
    found = (private_uses(text, dotted(path), package_of(path)) for path, text in texts().items())
    assert not set().union(*found)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from gpmil.show.slides import _region", "gpmil.show.slides._region"),
        ("from ..show.slides import _region as region", "gpmil.show.slides._region"),
        ("from gpmil.show import slides\nslides._region(1)", "gpmil.show.slides._region"),
        ("from gpmil.show import slides as s\nx = s._region", "gpmil.show.slides._region"),
        ("import gpmil.show.slides\ngpmil.show.slides._A", "gpmil.show.slides._A"),
        ("def f():\n    from gpmil.io import cache\n    cache._x()", "gpmil.io.cache._x"),
    ],
)
def test_a_private_name_of_another_module_is_found(source, found):
    module = "gpmil.viewer.tiles"
    assert private_uses(source, module, "gpmil.viewer") == {f"{module} uses {found}"}


def test_own_private_names_and_those_of_objects_are_let_through():
    source = (
        "import numpy\nfrom gpmil import __version__\nfrom gpmil.show import slides\n"
        "def _f(self):\n    numpy._x\n    slides.find._y\n    return self._kept(slides.find)"
    )
    assert private_uses(source, "gpmil.viewer.tiles", "gpmil.viewer") == set()


def test_no_module_is_longer_than_can_be_read_in_one_sitting():
    long = {dotted(p) for p, text in texts().items() if len(text.splitlines()) > MOST_LINES}
    assert not long


def test_no_function_is_longer_than_a_page():
    found = (long_functions(text, dotted(path)) for path, text in texts().items())
    assert not set().union(*found)


def test_a_long_function_is_found():
    body = "\n".join(["        pass"] * MOST_LINES_OF_A_FUNCTION)
    source = f"class A:\n    def f(self):\n{body}\n\n    def g(self):\n        pass"
    assert long_functions(source, "m") == {"m.A.f"}
    assert long_functions(source.replace("        pass\n", "", 1), "m") == set()


def said_public(source: str) -> list[str]:
    """What `__all__` lists; ruff checks that the names are there."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def test_modules_for_users_say_what_is_theirs():
    said = {dotted(path): said_public(text) for path, text in texts().items()}
    assert {module for module in FOR_USERS if not said[module]} == set()
    assert not [name for module in FOR_USERS for name in said[module] if name.startswith("_")]


def test_the_design_page_lists_the_tree():
    listed = {name for name in ORDER if name != "gpmil.__version__"}
    assert listed == {dotted(path) for path in MODULES}
    assert len(ORDER) == len(set(ORDER))


def test_users_find_modules_under_their_names():
    show = (
        f"import importlib\nfor door, room in {DOORS}.items():\n"
        "    a, b = importlib.import_module('gpmil.' + door), importlib.import_module(room)\n"
        "    names = b.__all__\n"
        "    print(door, all(getattr(a, n) is getattr(b, n) for n in names), len(names) > 0)"
    )
    found = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [f"{door} True True" for door in DOORS]


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
