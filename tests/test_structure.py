"""The rooms of the package: which file may import which, and what stays in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdp2

PACKAGE = Path(fsdp2.__file__).parent

# From top to bottom: a file imports files below it only.
ROOMS = [
    "__init__",
    "interop",
    "checkpoint",
    "checkpoint.progress",
    "checkpoint.full",
    "checkpoint.loading",
    "checkpoint.saving",
    "checkpoint.extra",
    "checkpoint.optimizer_state",
    "checkpoint.model_state",
    "checkpoint.storage",
    "checkpoint.meeting",
    "checkpoint.folders",
    "explain",
    "accounting",
    "materializing",
    "resetting",
    "deferred",
    "recording",
    "tape",
    "syncing",
    "safetensors_io",
    "safetensors_files",
    "api",
    "copying",
    "ties",
    "module",
    "whole",
    "clipping",
    "stepping",
    "muon",
    "owners",
    "neighbours",
    "spans",
    "norms",
    "arguments",
    "optimizers",
    "forward_methods",
    "hooks",
    "second_order",
    "pipelining",
    "checks",
    "replicas",
    "emptied",
    "checksums",
    "late_ties",
    "schedule",
    "adapting",
    "agreement",
    "measuring",
    "limits",
    "under_way",
    "order",
    "passes",
    "param_group",
    "portion",
    "gathers",
    "subclasses",
    "side_gather",
    "part",
    "calls",
    "gradients",
    "reduction",
    "gradient_layout",
    "placing",
    "find",
    "attributes",
    "marks",
    "specs",
    "sharded_param",
    "guard",
    "outer",
    "dealing",
    "gathering",
    "drawing",
    "cutting",
    "custom",
    "quantised_exchange",
    "buffers",
    "transports",
    "shared_memory",
    "peer_gather",
    "peer_sum",
    "truce",
    "loans",
    "segments",
    "notes",
    "peer_memory",
    "pairwise",
    "grouped",
    "direct_or_packed",
    "packing",
    "collectives",
    "streams",
    "quantising",
    "layout",
    "runs",
    "mesh",
    "compiling",
    "nested",
    "policies",
    "tracing",
    "trace_views",
    "transfers",
    "events",
    "errors",
    "_torch",
]


def room_of(path: Path) -> str:
    """`checkpoint.folders` of `checkpoint/folders.py`, `checkpoint` of its `__init__.py`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


FILES = {room_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = {room: ast.parse(path.read_text()) for room, path in FILES.items()}


def imported_rooms(tree: ast.Module) -> set[str]:
    """Files of this package that a file names in its imports, wherever they stand."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if (node.module or "").split(".")[0] == "fsdp2":
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    room = whole if whole.removeprefix("fsdp2.") in MODULES else node.module
                    found.add((room or "").removeprefix("fsdp2."))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("fsdp2.")]
            found |= {name.removeprefix("fsdp2.") for name in names}
    return found


def private_symbols(tree: ast.Module) -> Iterator[str]:
    """Private names of PyTorch's modules; `_foreach_*` ops have no public twin."""

    def is_private(name: str) -> bool:
        return name.startswith("_") and not name.startswith(("__", "_foreach_"))

    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            path = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(is_private(part) for part in path):
                yield ".".join(path)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                path = alias.name.split(".")
                if path[0] == "torch" and any(is_private(part) for part in path):
                    yield alias.name
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            dotted = ast.unparse(node)
            if dotted.split(".")[0] in {"torch", "dist", "nn"} and "(" not in dotted:
                yield dotted


def imports_in_functions(tree: ast.Module) -> list[int]:
    """The lines of imports that run later than the file's own import."""
    return [
        node.lineno
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]


def test_every_file_has_its_place() -> None:
    """The list above is the package's table of contents."""
    assert sorted(ROOMS) == sorted(MODULES)


@pytest.mark.parametrize("room", MODULES)
def test_arrows_go_down(room: str) -> None:
    """A file imports files below it and never above."""
    if room == "__init__":
        assert imported_rooms(MODULES[room]) <= set(ROOMS[1:])
        return
    below = set(ROOMS[ROOMS.index(room) + 1 :])
    assert imported_rooms(MODULES[room]) - below == set()


@pytest.mark.parametrize("room", sorted(set(MODULES) - {"_torch"}))
def test_private_pytorch_stays_in_one_file(room: str) -> None:
    """What may change with a PyTorch release is in `_torch.py`."""
    assert list(private_symbols(MODULES[room])) == []


def test_private_symbols_are_found() -> None:
    """The search above does find them where they are, and in every way of writing them."""
    assert len(list(private_symbols(MODULES["_torch"]))) >= 3
    written = """
import torch.distributed._composable
from torch.utils import _pytree
from torch._C import _x
torch.autograd.Variable._execution_engine.queue_callback(f)
dist.distributed_c10d._get_default_group()
torch._foreach_copy_(a, b)
torch.__version__
tensor._base
"""
    assert sorted(private_symbols(ast.parse(written))) == [
        "dist.distributed_c10d._get_default_group",
        "torch._C._x",
        "torch.autograd.Variable._execution_engine",
        "torch.distributed._composable",
        "torch.utils._pytree",
    ]


@pytest.mark.parametrize("room", sorted(set(MODULES) - {"__init__"}))
def test_no_import_inside_functions(room: str) -> None:
    """No circle is hidden by importing late; the package's lazy names are the one exception."""
    assert imports_in_functions(MODULES[room]) == []


@pytest.mark.parametrize("room", MODULES)
def test_engine_of_pytorch_is_not_used(room: str) -> None:
    """From `torch.distributed.fsdp` come the public types, in `_torch` alone."""
    for node in ast.walk(MODULES[room]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "torch.distributed.fsdp"
        ):
            assert room == "_torch"
            assert node.module == "torch.distributed.fsdp"

            names = {alias.name for alias in node.names}
            assert all(name[0].isupper() or name == "fully_shard" for name in names)


def test_pytorchs_fully_shard_is_a_key_and_never_called() -> None:
    """`_torch` names it once, to leave a module's state where PyTorch's own code looks for it."""
    uses = [n for n in ast.walk(MODULES["_torch"]) if getattr(n, "id", "") == "_their_fully_shard"]
    calls = [ast.unparse(n) for n in ast.walk(MODULES["_torch"]) if isinstance(n, ast.Call)]
    assert len(uses) == 1
    assert not [c for c in calls if c.startswith(("_their_fully_shard", "fully_shard"))]


@pytest.mark.parametrize("room", MODULES)
def test_files_are_readable_in_one_sitting(room: str) -> None:
    """More than 400 lines are a sign of two rooms in one."""
    assert len(FILES[room].read_text().splitlines()) <= 400
