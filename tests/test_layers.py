"""The rooms of src/stageline stand in data-flow order, and imports only point back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stageline
from stageline import torch_private

PACKAGE = Path(stageline.__file__).parent

ORDER = (
    "collecting",
    "errors",
    "wording",
    "log",
    "torch_private",
    "scheduling",
    "capturing",
    "partitioning",
    "planning",
    "running",
    "pipeline",
    "training",
    "observing",
    "plans",
    "compat",
    "cli",
    "testing",
)
DOORS = ("__init__", "__main__")  # they connect the rooms and may name any
PRIVATE = "torch_private.py"
ENDS = ("cli", "testing")  # they may use the front door; nobody in the house uses them


def imported_modules(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Yield line and full dotted name of all that is imported, wherever it stands in the file.

    `from a import b` yields `a.b`: b may be a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join((*base, *([node.module] if node.module else [])))
            for alias in node.names:
                yield node.lineno, f"{start}.{alias.name}"


def all_imports(package: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (where, room, imported name) for every import below the folder of a package."""
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        room = relative.parts[0].removesuffix(".py")
        parents = (package.name, *relative.parts[:-1])
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for line, name in imported_modules(tree, parents):
            yield f"{relative.as_posix()}:{line}", room, name


def upward_imports(package: Path = PACKAGE) -> Iterator[str]:
    """Yield a sentence for every import that points forward, and for a room without a place."""
    for where, room, name in all_imports(package):
        top, *rest = name.split(".")
        if top == package.name and room not in DOORS:
            sentence = fault(room, rest[0] if rest else "")
            if sentence:
                yield f"{where} {sentence}"


def fault(room: str, target: str) -> str | None:
    """Say what is wrong when a file of `room` imports `target` of the same package, if anything."""
    if room not in ORDER:
        return f"belongs to {room!r}, which has no place in ORDER: give it one in test_layers.py"
    if room == target or room == "testing":
        return None
    if target not in ORDER:
        return None if room in ENDS else "imports the front door, which lies after every room"
    if target in ENDS:
        return f"imports {target!r}, which nobody in the house may use"
    if ORDER.index(target) > ORDER.index(room):
        return f"imports {target!r}, which lies after {room!r}"
    return None


def torch_imports(package: Path = PACKAGE) -> Iterator[str]:
    """Yield a sentence for every import of torch in scheduling."""
    for where, room, name in all_imports(package):
        is_torch = name.split(".")[0] == "torch" or name.startswith("stageline.torch_private")
        if room == "scheduling" and is_torch:
            yield f"{where} imports {name!r}: a schedule is a function of integers"


def private_in_doors(package: Path = PACKAGE) -> Iterator[str]:
    """Yield a sentence for every private name of the engine that a door of an older system uses."""
    for where, room, name in all_imports(package):
        outside = name.startswith("stageline.") and not name.startswith("stageline.compat.")
        if room == "compat" and outside and any(map(is_private, name.split("."))):
            yield f"{where} imports {name!r}: what a door needs from the inside gets a public name"


def private_torch(package: Path = PACKAGE) -> Iterator[str]:
    """Yield a sentence for every private name of torch outside torch_private.py."""
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package).as_posix()
        if relative == PRIVATE:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for line, name in sorted(set(torch_names(tree))):
            if any(is_private(part) for part in name.split(".")):
                yield f"{relative}:{line} names {name!r}: give it a reason in {PRIVATE}"


def torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of all that is imported or taken from torch, as a path or text."""
    aliases = {"torch": "torch"}
    for line, alias, name in torch_imported(tree):
        yield line, name
        aliases[alias or "torch"] = name if alias else "torch"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            start, *rest = dotted(node) or [""]
            if start in aliases:
                yield node.lineno, ".".join((aliases[start], *rest))
        elif isinstance(node, ast.Constant) and str(node.value).startswith("torch._"):
            yield node.lineno, str(node.value)


def torch_imported(tree: ast.AST) -> Iterator[tuple[int, str | None, str]]:
    """Yield line, the name it goes by (if it gets one) and dotted name of all imports of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [(alias.asname, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported = [(a.asname or a.name, f"{node.module}.{a.name}") for a in node.names]
        else:
            continue
        for alias, name in imported:
            if name.split(".")[0] == "torch":
                yield node.lineno, alias, name


def dotted(node: ast.expr) -> list[str]:
    """Return the parts of `a.b.c`; nothing for what does not start with a name."""
    if isinstance(node, ast.Name):
        return [node.id]
    start = dotted(node.value) if isinstance(node, ast.Attribute) else []
    return [*start, node.attr] if start and isinstance(node, ast.Attribute) else []


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def private_members(package: Path = PACKAGE) -> Iterator[str]:
    """Yield the private members of torch's objects that are read or set on others than self."""
    known = {
        *dir(torch.Tensor),
        *vars(torch.nn.Module()),
        "_metadata",
        *vars(torch.autocast("cpu")),
    }
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr in known:
                owner = dotted(node.value)
                if owner not in (["self"], ["cls"]) and path.name != PRIVATE:
                    yield node.attr


def test_private_names_of_torch_stand_in_one_file() -> None:
    assert list(private_torch()) == []


def test_private_members_of_torch_objects_are_listed_with_their_reason() -> None:
    listed = str(torch_private.__doc__)
    assert {name for name in private_members() if name not in listed} == set()


def test_imports_only_point_back() -> None:
    assert list(upward_imports()) == []


def test_scheduling_never_imports_torch() -> None:
    assert list(torch_imports()) == []


def test_doors_use_public_names_of_the_engine() -> None:
    assert list(private_in_doors()) == []


def test_order_names_every_room() -> None:
    rooms = {
        path.stem
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path.is_dir() and any(path.rglob("*.py")))
    }
    assert rooms - set(ORDER) - set(DOORS) == set()


# The checker itself, on trees that break the rules.


def write_tree(root: Path, files: dict[str, str]) -> Path:
    package = root / "stageline"
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return package


@pytest.mark.parametrize(
    ("file", "line", "finding"),
    [
        (
            "scheduling/a.py",
            "from stageline.running import execute",
            "scheduling/a.py:1 imports 'running', which lies after 'scheduling'",
        ),
        (
            "scheduling/a.py",
            "import stageline.running.executor",
            "scheduling/a.py:1 imports 'running', which lies after 'scheduling'",
        ),
        (
            "running/deep/a.py",
            "from ...pipeline import Pipeline",
            "running/deep/a.py:1 imports 'pipeline', which lies after 'running'",
        ),
        (
            "errors.py",
            "from . import log",
            "errors.py:1 imports 'log', which lies after 'errors'",
        ),
        (
            "partitioning/a.py",
            "from stageline import planning",
            "partitioning/a.py:1 imports 'planning', which lies after 'partitioning'",
        ),
        (
            "running/a.py",
            "def late():\n    from stageline.compat import varuna",
            "running/a.py:2 imports 'compat', which lies after 'running'",
        ),
        (
            "pipeline.py",
            "from stageline import Schedule",
            "pipeline.py:1 imports the front door, which lies after every room",
        ),
        (
            "pipeline.py",
            "import stageline",
            "pipeline.py:1 imports the front door, which lies after every room",
        ),
        (
            "compat/a.py",
            "from stageline.testing import plain_step",
            "compat/a.py:1 imports 'testing', which nobody in the house may use",
        ),
        (
            "attic/a.py",
            "from stageline.errors import PipeError",
            "attic/a.py:1 belongs to 'attic', which has no place in ORDER:"
            " give it one in test_layers.py",
        ),
    ],
)
def test_an_upward_import_is_found(tmp_path: Path, file: str, line: str, finding: str) -> None:
    assert list(upward_imports(write_tree(tmp_path, {file: line}))) == [finding]


def test_imports_that_point_back_are_allowed(tmp_path: Path) -> None:
    package = write_tree(
        tmp_path,
        {
            "__init__.py": "from stageline.pipeline import Pipeline",
            "__main__.py": "from stageline.cli import main",
            "scheduling/__init__.py": "from .action import Action\nfrom stageline import errors",
            "running/a.py": "import torch\nfrom stageline.errors import PipeError\nfrom . import b",
            "cli/__init__.py": "import stageline as sl\nfrom ..scheduling import gpipe",
            "testing/a.py": "import stageline\nfrom stageline.running import execute",
        },
    )
    assert list(upward_imports(package)) == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch",
        "import torch.nn as nn",
        "from torch.fx import Graph",
        "from stageline.torch_private import tree_flatten",
    ],
)
def test_torch_in_scheduling_is_found(tmp_path: Path, line: str) -> None:
    package = write_tree(tmp_path, {"scheduling/a.py": line, "running/a.py": line})
    (finding,) = torch_imports(package)
    assert finding.startswith("scheduling/a.py:1 imports '")


def test_a_private_name_in_a_door_is_found(tmp_path: Path) -> None:
    lines = "from stageline.running.engine import _cut\nfrom stageline.compat.old._IR import Pipe"
    package = write_tree(tmp_path, {"compat/old/a.py": lines, "running/b.py": lines})
    (finding,) = private_in_doors(package)
    assert finding.startswith("compat/old/a.py:1 imports 'stageline.running.engine._cut'")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch.utils import _pytree", "torch.utils._pytree"),
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("import torch\nwith torch._C.DisableTorchFunction(): pass", "torch._C"),
        ("from torch.utils import checkpoint as c\nc._x()", "torch.utils.checkpoint._x"),
        ('import sys\n"torch._dynamo" in sys.modules', "torch._dynamo"),
    ],
)
def test_a_private_name_of_torch_is_found(tmp_path: Path, text: str, name: str) -> None:
    package = write_tree(tmp_path, {"running/a.py": text, PRIVATE: text})
    line = text.count("\n") + 1
    reason = f"give it a reason in {PRIVATE}"
    assert f"running/a.py:{line} names {name!r}: {reason}" in list(private_torch(package))


def test_public_names_of_torch_and_own_private_names_are_allowed(tmp_path: Path) -> None:
    text = "import torch\nfrom stageline.a import _b\ntorch.__version__, _b._c, torch.nn.Linear"
    assert list(private_torch(write_tree(tmp_path, {"running/a.py": text}))) == []
