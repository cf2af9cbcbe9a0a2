"""Rules of the code that no linter checks: files import one another in no circle; and what tests import, which names
they use, and where they lie."""

from __future__ import annotations

import ast
import collections
import graphlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import grimp

TESTS = Path(__file__).parent
ROOT = TESTS.parent
CLIENT = "elasticctl"
OURS = (
    CLIENT,
    "elasticctl_controller",
    "elasticctl_launcher",
    "elasticctl_protocol",
    "elasticctl_store",
    "elasticctl_train",
    "job_templates",
)
BESIDE_THE_CLIENT = {name: f"elasticctl_{name}" for name in ("controller", "launcher", "protocol", "store", "train")}
NO_MIRROR = {"support", "on_cluster", "benchmarks"}
"""Folders that are no package's: helpers, what needs a cluster, and the tests of benchmarks/."""


def imports(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str, str]]:
    """(module, name, the name it is bound to) of every import from a module, wherever it stands."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "", alias.asname or alias.name.partition(".")[0]) for alias in node.names)


def is_ours(module: str) -> bool:
    return module.partition(".")[0] in OURS


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_uses(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Private names of our packages that a test imports, reads from a module or a class, or replaces by its name."""
    found = list(imports(nodes))
    yield from (f"{module}.{name}" for module, name, _ in found if is_ours(module) and is_private(name))
    bound = {alias: f"{module}.{name}" for module, name, alias in found if is_ours(module)}
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in bound and is_private(name):
                yield f"{bound[owner]}.{name}"
            case ast.Call(
                func=ast.Attribute(attr="setattr" | "delattr"),
                args=[ast.Name(id=owner), ast.Constant(value=str(name)), *_],
            ) if owner in bound and is_private(name):
                yield f"{bound[owner]}.{name}"


def test_no_files_import_one_another_in_a_circle() -> None:
    """Imports in functions and those for types alone count as well."""
    found = grimp.build_graph(*OURS, cache_dir=None)
    graph = {module: found.find_modules_directly_imported_by(module) for module in found.modules}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(graph)  # raises CycleError


def test_each_variable_is_spelled_once() -> None:
    """In `elasticctl_protocol.variables`; and in the bootstrap of a rank, which can import none of our packages."""
    found = {
        f"{path.relative_to(ROOT)}: {node.value}"
        for folder in ("elasticctl", "controller", "training_lib")
        for path in (ROOT / folder).rglob("*.py")
        if path.name not in ("variables.py", "bootstrap.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and re.fullmatch("ELASTICCTL_[A-Z_]+", str(node.value))
    }
    assert found == set()


def test_each_test_module_stands_alone() -> None:
    """It can be merged, renamed or removed by itself, and so can what it tests, names that start with _ above all."""
    found = {str(path.relative_to(TESTS)): [*forbidden_imports(path)] for path in sorted(TESTS.rglob("*.py"))}
    assert {path: names for path, names in found.items() if names} == {}


def forbidden_imports(path: Path) -> Iterator[str]:
    """What a test module imports from other tests that are no helpers, or from private parts of our packages."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    shared = ("tests.support", "tests.on_cluster") if "on_cluster" in path.parts else ("tests.support",)
    helpers = {f"{module}.{name}" for module, name, _ in imports(nodes) if module.partition(".")[0] == "tests"}
    yield from (name for name in helpers if not name.startswith(shared) or ".test_" in name)
    yield from private_uses(nodes)


def test_the_tests_lie_as_the_source_does() -> None:
    """tests/store/storage holds the tests of elasticctl_store.storage, tests/cli those of elasticctl.cli."""
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")} - {Path()}
    packages = {package_of(folder) for folder in folders if folder.parts[0] not in NO_MIRROR}
    assert [package for package in sorted(packages) if importlib.util.find_spec(package) is None] == []


def package_of(folder: Path) -> str:
    """The package whose tests lie in this folder of tests/."""
    first, *rest = folder.parts
    return ".".join((BESIDE_THE_CLIENT.get(first, f"{CLIENT}.{first}"), *rest))


def test_operations_use_no_terminal() -> None:
    """They print nothing and ask nothing: the caller decides that."""
    streams = {"stdin", "stdout", "stderr"}
    used = [
        f"{path.name}:{node.lineno}"
        for path in (ROOT / "elasticctl/operations").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if (isinstance(node, ast.Attribute) and node.attr in streams)
        or (isinstance(node, ast.Name) and node.id in ("print", "input"))
    ]
    assert used == []


PUBLIC_NAMES = {"ElasticCallback", "settle"}
"""What users' scripts call: a callback for each of two frameworks, and the checkpointer's oldest method."""
VAGUE = {"take", "begin", "note", "look", "settle", "forget", "keep"}


def test_each_class_name_has_one_meaning_and_each_function_says_what_it_does() -> None:
    nodes = [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node)
        for folder in ("elasticctl", "controller", "training_lib")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in PUBLIC_NAMES
    ]
    classes = collections.Counter(node.name for _, node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1] == []
    assert [where for where, node in nodes if node.name.strip("_") in VAGUE] == []


MUTATORS = re.compile(r"(add|append|clear|discard|extend|insert|pop|popitem|remove|setdefault|(\w+_)?update)$")
"""Methods that change a set, a list or a dict; methods of our own have longer names."""


def test_each_field_of_the_controllers_core_is_assigned_by_the_class_that_declares_it_alone() -> None:
    """So one class shows which values a field can have."""
    core = Path(importlib.util.find_spec("elasticctl_controller.core").origin or "").parent  # type: ignore[union-attr]
    found = {str(path.relative_to(core)): [*foreign_writes(path)] for path in sorted(core.rglob("*.py"))}
    assert {path: writes for path, writes in found.items() if writes} == {}


def foreign_writes(path: Path) -> Iterator[str]:
    """`line: target` for what is assigned to, or changed in, a field of another object or of a base class."""
    tree = ast.parse(path.read_text("utf-8"))
    own = {node: declared(each) for each in ast.walk(tree) if isinstance(each, ast.ClassDef) for node in ast.walk(each)}
    for node in ast.walk(tree):
        for target in written(node):
            while isinstance(target, ast.Subscript | ast.Starred):
                target = target.value
            match target:
                case ast.Attribute(value=ast.Name(id="self"), attr=name) if name in own.get(node, ()):
                    continue
                case ast.Attribute():
                    yield f"{node.lineno}: {ast.unparse(target)}"  # type: ignore[attr-defined]


def declared(owner: ast.ClassDef) -> set[str]:
    """The fields of a class: those in its body, and those that its constructor assigns."""
    fields = {
        each.target.id for each in owner.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for method in owner.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            fields |= {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
    return fields


def written(node: ast.AST) -> list[ast.expr]:
    """What a node assigns to, deletes, or changes by a method of a container."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            return [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            return [target]
        case ast.Call(func=ast.Attribute(value=ast.Attribute() as changed, attr=name)) if MUTATORS.match(name):
            return [changed]
    return []
