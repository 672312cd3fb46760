"""The project as a whole: its environment, its rooms, its committed notebooks and its commands."""

import ast
import importlib
import operator
import re
import subprocess
import sys
import tomllib

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from q0lib import paths
from q0lib.study import plan
from q0lib.study.tables import ablations, store
from q0lib.sweeps import refresh

MODULES = {  # dotted name: path; a folder's own module has the folder's name
    ".".join(path.relative_to(paths.ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (paths.ROOT / "q0lib").rglob("*.py")
}
# What each folder may import; "" is the method, q0lib itself.
ARROWS = {
    "": {""},
    "plots": {"", "plots"},
    "own_text": {"", "plots", "own_text"},
    "sweeps": {"", "sweeps"},
    "study": {"", "plots", "sweeps", "study"},
}


def environment() -> dict[str, str]:
    spec = yaml.safe_load((paths.ROOT / "environment.yml").read_text())
    pins = next(item["pip"] for item in spec["dependencies"] if isinstance(item, dict))
    return {canonicalize_name(name): version for name, version in (p.split("==") for p in pins)}


def test_environment_pins_what_pyproject_ranges_and_nothing_else():
    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]
    asked = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["dev"]])
    ranges = {canonicalize_name(each.name): each.specifier for each in asked}
    pins = environment()
    assert sorted(pins) == sorted(ranges)
    for name, version in pins.items():
        assert version in ranges[name], f"{name} {version} is outside {ranges[name]}"
        assert not str(ranges[name]).startswith("=="), f"{name}: pyproject.toml holds ranges"
    assert pins["torch"] == "2.13.0"


def test_every_line_of_the_environment_says_why():
    lines = (paths.ROOT / "environment.yml").read_text().splitlines()
    items = [line for line in lines if line.lstrip().startswith("- ") and not line.endswith(":")]
    assert len(items) > 20
    assert [line for line in items if not re.search(r"  # \S", line)] == []


def q0_imports(path) -> set[str]:
    """The project's modules that a module imports, anywhere in it, by dotted name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return found & set(MODULES)


def room(module: str) -> str:
    """The folder of a module: "" for the method, else own_text, plots, sweeps or study."""
    inside = module.removeprefix("q0lib").strip(".").partition(".")[0]
    return inside if inside in ARROWS else ""


def test_rooms_import_one_way():
    imports = {name: q0_imports(path) - {"q0lib"} for name, path in MODULES.items()}
    for name, needs in imports.items():
        for other in needs:
            assert room(other) in ARROWS[room(name)], f"{name} must not import {other}"
    pure = {"prior": set(), "efficiency": set(), "schedule": set(), "allocation": set(),
            "ensemble": {"q0lib.prior"}, "paths": set()}  # fmt: skip
    for name, allowed in pure.items():
        assert imports[f"q0lib.{name}"] <= allowed, f"{name} takes arrays and numbers"
    tables = {name for name in MODULES if name.startswith("q0lib.study.tables")}
    assert not any(room(other) == "plots" for name in tables for other in imports[name])
    folders = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    done: set[str] = set(folders)
    left = {name: needs for name, needs in imports.items() if name not in folders}
    while ready := {n for n, needs in left.items() if n not in done and needs <= done}:
        done |= ready
    assert done == set(imports), f"a cycle among {sorted(set(imports) - done)}"


def test_import_changes_nothing():
    names = ", ".join(name for name in sorted(MODULES) if "__main__" not in name)
    program = (
        "import sys, signal, torch; threads = torch.get_num_threads()\n"
        f"import {names}\n"
        "assert torch.get_num_threads() == threads\n"
        "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL\n"
        "assert 'matplotlib.pyplot' not in sys.modules, 'no backend is chosen at import'\n"
        "assert 'datasets' not in sys.modules, 'no network at import'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("notebook", refresh.narratives(), ids=lambda path: path.stem)
def test_committed_notebooks_are_what_their_code_and_tables_give(notebook):
    assert refresh.stale(notebook) is None


@pytest.mark.parametrize("path", sorted(paths.NOTEBOOKS.glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebooks_call_what_the_library_has(path):
    """A stale notebook is found by the test above, but one that runs on request only by none."""
    cells = nbformat.read(path, as_version=4).cells
    tree = ast.parse("\n".join(cell.source for cell in cells if cell.cell_type == "code"))
    called = {
        alias.asname or alias.name: importlib.import_module(f"{node.module}.{alias.name}")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if f"{node.module}.{alias.name}" in MODULES
    }
    assert called

    def lacks(node: ast.expr) -> bool:
        try:
            operator.attrgetter(ast.unparse(node).partition(".")[2])(called[root(node)])
        except AttributeError:
            return True
        return False

    def root(node: ast.expr) -> str:
        while isinstance(node, ast.Attribute):
            node = node.value
        return node.id if isinstance(node, ast.Name) else ""

    asked = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    missing = [ast.unparse(node) for node in asked if root(node) in called and lacks(node)]
    assert missing == []


@pytest.mark.parametrize(
    "module",
    [
        "",
        "train",
        "study",
        "study.runs",
        "study.prior_variations",
        "sweeps",
        "sweeps.refresh",
        "bench",
    ],
)
def test_help_exits_at_once(module):
    result = subprocess.run(
        [sys.executable, "-m", f"q0lib.{module}".rstrip("."), "--help"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0
    assert "usage: python -m q0lib" in result.stdout


def test_readme_names_only_commands_and_files_that_exist():
    readme = (paths.ROOT / "README.md").read_text()
    targets = re.findall(r"^([a-z]+):", (paths.ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`?make ([a-z]+)", readme)) <= set(targets)
    assert {"study", "test"} <= set(re.findall(r"make ([a-z]+)", readme))
    for name in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (paths.ROOT / name).exists(), name
    for module in re.findall(r"python -m (q0lib[a-z_.]*[a-z])", readme):
        assert module in MODULES


def test_the_readmes_table_is_that_of_the_study():
    folder = paths.RESULTS / "cpu"
    summary = store.read(folder / "summary.csv").set_index("metric")
    snapshots = store.read(folder / "snapshots.csv")
    curves = store.read(folder / "epoch_efficiency.csv", method=["ensemble"])
    leads = ablations.leads(snapshots, curves).set_index(["method", "axis"])
    undistilled = leads.loc[(plan.UNDISTILLED, "flops")]
    named = {
        "epochs than the ensemble of 256, at its best K": "epoch_efficiency_best_k_8_seeds",
        "... at K = 8, the ensemble's own, chosen greedily": "epoch_efficiency_k8_greedy_8_seeds",
        "FLOPs, at its best K": "flop_efficiency_best_k_8_seeds",
        "epochs than an ensemble distilled in a chain": "epoch_efficiency_vs_distilled_ensemble",
        "to match q0 after 256 epochs": "data_efficiency_q0",
        "to match q0 after 128 epochs": "data_efficiency_q0_128_epochs_8_seeds",
        "to match the ensemble of 256": "data_efficiency_baseline_256_epochs_8_seeds",
        "to match the best single model": "data_efficiency_single_32_epochs_8_seeds",
    }
    expected = {
        line: [f"{row.value:.1f}", f"{row.low:.1f} to {row.high:.1f}", f"{row.seeds}"]
        for line, row in ((line, summary.loc[metric]) for line, metric in named.items())
    }
    low, high = undistilled.low, undistilled.high
    expected["... without distillation (interval of the seeds alone)"] = [
        f"{undistilled.multiplier:.1f}", f"{low:.1f} to {high:.1f}", "3",
    ]  # fmt: skip
    readme = (paths.ROOT / "README.md").read_text()
    table = re.findall(
        r"^\| (.+?) \| ([\d.]+) \| ([\d.]+ to [\d.]+) \| (\d) \|", readme, re.MULTILINE
    )
    assert {line: said for line, *said in table} == expected
    best = expected["epochs than the ensemble of 256, at its best K"]
    assert f"after {best[0]} times fewer epochs (95% interval {best[1]}" in readme
    cut = summary.loc["epoch_efficiency_k8_8_seeds"]
    assert (
        f"| ... at K = 8 by the paper's cut | {cut.reached} of {cut.seeds} seeds get there"
        in readme
    )
