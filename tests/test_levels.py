"""Import levels: who may import whom, no cycles, torch and torch.distributed only where they belong."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "stretto"
LEVELS = {
    "base": 0,
    "config": 1,
    "plan": 2,
    "mesh": 2,
    "blocks": 2,
    "store": 2,
    "windows": 3,
    "prepare": 3,
    "exchange": 3,
    "engine": 3,
    "parallel": 3,
    "checkpoint": 3,
    "train": 4,
    "measure": 4,
    "report": 4,
    "serve": 5,
    "launch": 5,
    "planner": 4,
    "planning": 6,
    "cli": 7,
}
# What a package may import from the top level; for others it would be a way around the levels.
TOP_LEVEL = {"cli": ("stretto", "stretto.__version__")}
WITHOUT_TORCH = ("config", "plan")
# The part of torch.distributed that each package may use; mesh owns all that is not named here.
DISTRIBUTED = {
    "mesh": ("torch.distributed",),
    "parallel": ("torch.distributed",),
    "launch": ("torch.distributed.elastic", "torch.distributed.launcher"),
}


def modules() -> dict[str, Path]:
    """Every module by its dotted name."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(source: str) -> set[str]:
    """Every module that a source names in an import, wherever it stands, `from x import y` as x and x.y."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed"):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "imports are absolute"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def package(module: str) -> str | None:
    """The package of a module; None at the top level (`stretto`, `stretto.testing`, `stretto.__main__`)."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (SOURCE / parts[1]).is_dir() else None


def wrong_imports(module: str, source: str) -> list[str]:
    """What a module imports that its level does not allow."""
    own = package(module)
    wrong = []
    for name in imports(source):
        if own in WITHOUT_TORCH and name.split(".")[0] == "torch":
            wrong.append(name)
        allowed = DISTRIBUTED.get(own or "", ())
        if f"{name}.".startswith("torch.distributed.") and not any(f"{name}.".startswith(f"{a}.") for a in allowed):
            wrong.append(name)
        if (
            own is not None
            and name.startswith("stretto")
            and package(name) is None
            and name not in TOP_LEVEL.get(own, ())
        ):
            wrong.append(name)
        target = package(name) if name.split(".")[0] == "stretto" else None
        if own is not None and target is not None and target != own and LEVELS[target] >= LEVELS[own]:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("module", modules())
def test_a_package_imports_only_from_lower_levels(module: str) -> None:
    assert wrong_imports(module, modules()[module].read_text()) == []


def test_every_package_has_a_level() -> None:
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages <= set(LEVELS)


def test_no_two_modules_import_each_other() -> None:
    known = modules()
    graph = {name: imports(path.read_text()) & set(known) - {name} for name, path in known.items()}
    # The top level imports lazily by name, and the command's version comes from there.
    graph["stretto"] = set()
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("stretto.config.run", "import torch"),
        ("stretto.config.run", "from torch import nn"),
        ("stretto.store.corpus", "from stretto.windows.lanes import Lanes"),
        ("stretto.base.state", "import stretto.engine.local"),
        ("stretto.engine.local", "from stretto.train.trainer import Trainer"),
        ("stretto.train.trainer", "import torch.distributed as dist"),
        ("stretto.train.trainer", "from torch import distributed"),
        ("stretto.train.trainer", "import torch\ntorch.distributed.barrier()"),
        ("stretto.base.state", "from stretto import Trainer"),
        ("stretto.base.state", "import stretto"),
        ("stretto.base.state", "from stretto.testing import check_chunk_law"),
    ],
)
def test_a_wrong_import_is_noticed(module: str, source: str) -> None:
    assert wrong_imports(module, source)


@pytest.mark.parametrize(
    "code",
    [
        "import stretto",
        "import stretto.config.toml",
        "import stretto.base.errors, stretto.base.keys",
        "from stretto.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from stretto.cli.main import main\ntry: main(['train', '--help'])\nexcept SystemExit: pass",
        "from stretto.cli.main import main\nassert main(['train', 'missing.toml']) == 2",
        "from stretto.cli.main import main\nassert main(['schema']) == 0",
    ],
)
def test_torch_is_not_imported_until_it_is_needed(code: str) -> None:
    check = f"{code}\nimport sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], stdout=subprocess.DEVNULL, check=False).returncode == 0
