"""The shape of the repository: layers of imports, public names and pins are as agreed."""

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

# The lowest comes first. A module imports from its own layer and from those before it in this list.
LAYERS = [
    "foreign",
    "warn",
    "extras",
    "lanes",
    "graphs",
    "coupling",
    "truncated",
    "kernels",
    "compiled",
    "ep",
    "ep_bag",
    "orthant",
    "orthant_large",
    "coupled",
    "classes",
    "extraction",
    "bag_checks",
    "bag_positions",
    "bag_tables",
    "bags",
    "features",
    "inducing",
    "sparse_gp",
    "memory",
    "pieces",
    "fused_kernel",
    "fused",
    "leave_out",
    "inference",
    "logistic",
    "evidence",
    "tuning",
    "persistence",
    "calibration",
    "intervals",
    "metrics",
    "distributed",
    "models",
    "simulate",
    "io",
    "plots",
    "slides",
    "heatmaps",
    "qupath",
    "report",
    "run_files",
    "run_labels",
    "runs",
    "run_report",
    "viewer",
    "paper",
    "bench",
    "cli",
    "__main__",
]
KNOW_NOTHING_OF_BAGS = ["graphs", "coupling", "truncated", "orthant"]

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


def layer_of(module: str) -> str:
    return module.split(".")[1]


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


def faults(source: str, module: str, package: str) -> list[str]:
    """What is wrong with the imports of a module, in words."""
    if layer_of(module) not in LAYERS:
        return [f"{module} has no layer: add it to LAYERS where it belongs"]
    found = []
    for name in sorted(imported(source, package)):
        if name == "gpmil.__version__":
            continue
        layer = layer_of(name) if "." in name else None
        if layer not in LAYERS:
            found.append(f"{module} imports {name}: import from a module that has a layer")
        elif LAYERS.index(layer) > LAYERS.index(layer_of(module)):
            found.append(f"{module} imports {name}, a layer that comes after its own")
    return found


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_come_from_the_same_layer_or_earlier_ones(path):
    module = dotted(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    assert faults(path.read_text(encoding="utf-8"), module, package) == []


def test_the_design_page_has_the_same_layers():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    block = text.partition("## Import layers")[2].split("```")[1].removeprefix("text\n")
    rows = [line[:44] for line in block.splitlines() if not line.startswith(" ")]
    assert [name for row in rows for name in row.replace(",", " ").split()] == LAYERS


@pytest.mark.parametrize("layer", KNOW_NOTHING_OF_BAGS)
def test_lowest_layers_know_nothing_of_bags(layer):
    for path in (path for path in MODULES if layer_of(dotted(path)) == layer):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert "Bags" not in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gpmil.coupling.operator", "from gpmil.data.bags import Bags"),
        ("gpmil.coupling.operator", "from gpmil import bags"),
        ("gpmil.coupling.operator", "from .bags import Bags"),
        ("gpmil.coupling.operator", "from . import bags"),
        ("gpmil.coupling.operator", "import gpmil.models.base as base"),
        ("gpmil.models.base", "from ..plots import roc"),
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
        ("gpmil.coupling.operator", "from gpmil.data.graphs import laplacian"),
        ("gpmil.data.bags", "from . import graphs"),
        ("gpmil.models.vgpmil_pr", "from .base import Model\nfrom ..bags import Bags"),
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
    submodules = {f"{layer}:module" for layer in LAYERS}
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
    # bench has the naive ways beside ours
    used = [p for p in MODULES if module in p.read_text() and layer_of(dotted(p)) != "bench"]
    assert (credit in row) == bool(used)


def test_contributing_says_what_the_targets_do():
    recipes = (ROOT / "Makefile").read_text(encoding="utf-8")
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `make (\w+)` \| (.*) \|$", table, flags=re.M))
    bodies = dict(re.findall(r"^(\w+):.*\n((?:\t.*\n)+)", recipes, flags=re.M))
    assert set(rows) <= set(bodies) and {"bench", "studies"} <= set(rows)
    assert "gpmil bench" in bodies["bench"] and "gpmil bench" in rows["bench"]
    assert "$(SCRIPTS)" in bodies["studies"] and "benchmarks/" in rows["studies"]
