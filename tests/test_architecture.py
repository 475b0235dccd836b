"""The rules of docs/architecture.md that no single module can hold by itself.

Imports run one way, and a file is registered nowhere but in the table of tests and in a gin line.
"""

import ast
import functools
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import reformax.ops
from reformax.cli import configs

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "reformax"
TOP_LEVEL_LINKS = ("layers", "models")

# What a part of the package may import from the package. Every part may declare its settings.
MAY_IMPORT = {
    "declared.py": set(),
    "shell.py": set(),
    "derivatives.py": set(),
    "buffers.py": {"derivatives"},
    "devices.py": {"buffers"},
    "memory.py": set(),
    "progress.py": set(),
    "task.py": set(),
    "ops": {"ops", "buffers", "derivatives"},
    "layers": {"ops", "layers", "buffers"},
    "nn.py": {"ops"},
    "flax": {"ops", "nn", "flax", "buffers"},
    "models": {"ops", "layers", "models", "task"},
    "data": {"data", "durable", "memory", "progress", "shell", "task"},
    "training": {
        *("ops", "generation", "training", "buffers", "durable", "memory", "progress"),
        *("shell", "task"),
    },
    "generation": {"generation", "memory", "progress"},
    "evals": {"evals", "data", "generation", "progress"},
    "cli": {
        *("cli", "ops", "models", "data", "training", "generation", "evals", "durable"),
        *("shell", "task"),
    },
    "convert": {
        *("ops", "layers", "models", "data", "training", "cli", "convert", "durable", "memory"),
        "shell",
    },
    "durable.py": set(),
    "__init__.py": {"cli", "durable"},  # by `load_run` alone, when it is called
    "__main__.py": {"__version__", "cli"},  # and what its table of commands names
}
# The only modules of the package that import each of these.
SOLE_IMPORTERS = {
    "trax": ["reformax/layers/_trax.py"],
    "gin": [
        f"reformax/{name}.py"
        for name in (
            *("cli/config", "cli/lookup", "cli/parsed", "cli/reading", "cli/statements"),
            "training/wandb_log",
        )
    ],
}


def python_files(*folders: str) -> list[Path]:
    """All of the repository's own modules, or those under `folders`, without following links."""
    roots = [ROOT / f for f in folders or ("reformax", "tests", "benchmarks", "tools", "docs")]
    found = [p for root in roots for p in root.rglob("*.py")]
    return sorted(found if folders else [*found, *ROOT.glob("*.py")])


def name(path: Path) -> str:
    """`path` as seen from the repository's root."""
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    """The dotted name under which `path` is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Dotted names that `tree`, a module of `package`, imports anywhere, functions included.

    `from a import b` gives `a.b`: whether b is a module cannot be read off the source.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            function = node.func.attr if isinstance(node.func, ast.Attribute) else None
            function = node.func.id if isinstance(node.func, ast.Name) else function
            argument = node.args[0]
            if function in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                yield argument.value


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Dotted names that the module at `path` imports."""
    package = module_name(path if path.name == "__init__.py" else path.parent / "__init__.py")
    return tuple(imports(parsed(path), package))


def roots_of(path: Path) -> set[str]:
    """Names of the distributions' top-level packages that the module at `path` imports."""
    return {n.split(".")[0] for n in imports_of(path)}


def test_imports_are_found_in_every_form():
    source = """
import a.b
from c import d
from . import e
from .f import g
from ..h import i
def lazily():
    import j
    importlib.import_module("k.l")
"""
    found = set(imports(ast.parse(source), "reformax.ops"))
    expected = {"a.b", "c.d", "reformax.ops.e", "reformax.ops.f.g", "reformax.h.i", "j", "k.l"}
    assert found == expected


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_run_one_way(part):
    files = [PACKAGE / part] if part.endswith(".py") else python_files(f"reformax/{part}")
    assert files, f"reformax/{part} is empty"
    for path in files:
        inner = [n.split(".") for n in imports_of(path) if n.split(".")[0] == "reformax"]
        may = {"declared", "devices", *MAY_IMPORT[part]}
        wrong = {".".join(n) for n in inner if len(n) < 2 or n[1] not in may}
        assert not wrong, f"{name(path)} may not import {sorted(wrong)}"


# The rooms of ops, and which others each may import. None imports an op or the contract in
# `base.py`; kernels are imported by function, when `impl` chooses them.
ROOMS = {
    "numerics": set(),
    "masking": set(),
    "calls": {"numerics", "masking"},
    "sharding": {"masking", "calls"},
    "softmax": {"numerics", "masking", "calls", "sharding", "kernels"},
    "hashing": {"numerics", "masking", "calls", "sharding", "softmax", "kernels"},
    "recurrence": {"numerics", "masking", "calls", "sharding", "softmax", "kernels"},
    "decoding": {"numerics", "masking", "calls", "softmax", "kernels"},
    "indexing": {
        *("numerics", "masking", "calls", "sharding", "softmax", "hashing", "decoding", "kernels")
    },
    "compressing": {"numerics", "masking", "calls", "sharding", "softmax", "decoding", "kernels"},
    "kernels": {"numerics", "masking", "calls", "softmax", "hashing", "recurrence"},
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_of_ops_imports_no_op_and_the_rooms_below_it_alone(room):
    for path in python_files(f"reformax/ops/{room}"):
        inner = [n.split(".")[2] for n in imports_of(path) if n.startswith("reformax.ops.")]
        wrong = set(inner) - {room} - ROOMS[room]
        assert not wrong, f"{name(path)} may not import {sorted(wrong)}"


def test_every_room_of_ops_has_a_rule():
    folders = {p.parent.name for p in (ROOT / "reformax/ops").glob("*/__init__.py")}
    assert folders == set(ROOMS)


def test_every_part_of_the_package_has_a_rule():
    parts = {p.relative_to(PACKAGE).parts[0] for p in python_files("reformax")}
    assert parts == set(MAY_IMPORT)


def test_no_files_import_each_other():
    files = {module_name(p): p for p in python_files()}
    graph = {
        m: {n if n in files else n.rpartition(".")[0] for n in imports_of(p)} - {m}
        for m, p in files.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # which names a circle


@pytest.mark.parametrize("library, paths", SOLE_IMPORTERS.items())
def test_these_modules_alone_import(library, paths):
    assert [name(p) for p in python_files("reformax") if library in roots_of(p)] == paths


# Used where they are installed; the package asks for none of them.
USED_IF_THERE = {"torch", "transformers", "wandb"}


def test_what_the_package_imports_is_a_dependency_or_an_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    named = {re.match(r"[\w-]+", line)[0].lower() for line in lines} | USED_IF_THERE
    distributions = metadata.packages_distributions()
    for path in python_files("reformax"):
        for module in roots_of(path) - sys.stdlib_module_names - {"reformax"}:
            found = {name.lower() for name in distributions.get(module, [module])}
            assert found & named, f"{name(path)} imports {module}, which pyproject.toml lacks"


def test_no_module_registers_itself_with_gin():
    names = {"configurable", "external_configurable", "register"}
    for path in python_files("reformax"):
        if not any(name in path.read_text() for name in names):
            continue
        nodes = list(ast.walk(parsed(path)))
        used = [n.func for n in nodes if isinstance(n, ast.Call)]
        used += [d for n in nodes for d in getattr(n, "decorator_list", [])]
        called = {ast.unparse(n).removeprefix("gin.") for n in used}
        assert not called & names, name(path)


def test_the_package_of_ops_has_every_op():
    """An op's file has a class of its name."""
    files = (p for p in (ROOT / "reformax/ops").glob("*.py"))
    named = {p.stem for p in files if f"\nclass {p.stem}(" in p.read_text()}
    assert named == {name for name in reformax.ops.__all__ if name.islower()}


def test_the_package_and_its_ops_import_what_is_asked_for():
    """As a notebook does, which completes names by `dir`."""
    code = """
import sys, reformax
assert 'jax' not in sys.modules
import reformax.ops as ops
assert 'reformax.ops.lsh' not in sys.modules
ops.lsh.lsh()
from reformax.ops import *
smyrf.smyrf(); ops.Dims(1, 1, 1, 1)
reformax.layers.Attention(reformax.ops.lsh.lsh()); reformax.models.ReformerLM(256)
[getattr(reformax, x) for x in dir(reformax)]; reformax.training; reformax.nn.op_of
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert set(reformax.ops.__all__) <= set(dir(reformax.ops))
    assert {"layers", "models", "load_run"} <= set(dir(reformax))
    with pytest.raises(AttributeError, match="^module 'reformax.ops' has no attribute 'fsyrm'$"):
        _ = reformax.ops.fsyrm
    with pytest.raises(AttributeError, match="^module 'reformax' has no attribute 'layer'$"):
        _ = reformax.layer


def test_ops_are_free_of_trax_and_tensorflow():
    banned = {"trax", "tensorflow", "tensorflow_datasets", "gin", "optax", "orbax"}
    for path in python_files("reformax/ops"):
        assert not roots_of(path) & banned, name(path)


def test_links_at_the_top_lead_into_the_package_and_nothing_imports_through_them():
    for link in TOP_LEVEL_LINKS:
        assert (ROOT / link).is_symlink()
        assert (ROOT / link).resolve() == PACKAGE / link
    for path in python_files():
        wrong = roots_of(path) & {*TOP_LEVEL_LINKS, "configs"}
        assert not wrong, f"{name(path)} imports {sorted(wrong)}"
    for path in (ROOT / "configs").rglob("*.gin"):
        wrong = re.findall(
            r"^\s*(?:import|from) (?:layers|models|configs)\b", path.read_text(), re.M
        )
        assert not wrong, f"{name(path)} imports {wrong}"


# Each with what it may not load. One interpreter imports them in this order: what one loads stays
# for the next, which is stricter than an interpreter each and takes a third of its time.
MAY_NOT_LOAD = {
    "reformax": {"jax", "trax", "tensorflow", "gin"},
    "reformax.ops": {"trax", "tensorflow", "tensorflow_datasets", "gin", "optax"},
    "reformax.generation": {"trax", "tensorflow", "gin", "optax"},
    "reformax.data": {"trax", "tensorflow"},
    "reformax.training": {"trax", "tensorflow"},
    "reformax.evals": {"trax", "tensorflow", "lm_eval"},
    "reformax.convert": {"tensorflow", "torch", "transformers", "safetensors"},
}


def test_importing_loads_no_more_than_it_needs_and_takes_no_device():
    code = ["import sys"]
    for module in MAY_NOT_LOAD:
        # Each file of the part, not only what its __init__ imports.
        path = ROOT.joinpath(*module.split("."))
        parts = [module_name(p) for p in path.rglob("*.py")] if module.count(".") else [module]
        code += ["import " + ", ".join(parts), "print(*{m.split('.')[0] for m in sys.modules})"]
    # A device would take a share of memory from the processes that a benchmark starts, and
    # jax.distributed must be begun before.
    folders = [PACKAGE, ROOT / "benchmarks" / "harness", ROOT / "benchmarks" / "rows"]
    paths = [p for folder in folders for p in folder.rglob("*.py") if p.stem != "__main__"]
    paths += (ROOT / "benchmarks").glob("*.py")
    paths += (ROOT / "tools").glob("*.py")
    code.append("import " + ", ".join(sorted(map(module_name, paths))))
    code.append("from jax._src import xla_bridge")
    code.append("assert not xla_bridge.backends_are_initialized(), 'a device is taken'")
    command = [sys.executable, "-c", "\n".join(code)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for (module, banned), line in zip(MAY_NOT_LOAD.items(), run.stdout.splitlines(), strict=True):
        loaded = set(line.split())
        assert "reformax" in loaded
        assert not loaded & banned, f"{module} loads {sorted(loaded & banned)}"


def public_definitions(path: Path) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Functions and classes of the module at `path` whose names carry no underscore."""
    for node in parsed(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node


@pytest.mark.parametrize("path", python_files("reformax"), ids=name)
def test_what_is_public_is_documented(path):
    assert ast.get_docstring(parsed(path)), f"{name(path)} has no docstring"
    for node in public_definitions(path):
        assert ast.get_docstring(node), f"{name(path)}:{node.lineno} {node.name} has no docstring"


@pytest.mark.parametrize("path", python_files("reformax/ops"), ids=name)
def test_public_functions_of_ops_say_what_they_return(path):
    for node in public_definitions(path):
        if isinstance(node, ast.FunctionDef):
            assert node.returns, f"{name(path)}:{node.lineno} {node.name} has no return type"


GIN_FILES = sorted((ROOT / "configs").rglob("*.gin"))


# What a config's line after its command says: card, minutes, score.
RESULT = re.compile(
    r"(2 CPU cores|One (?:GPU|H100|H200)|Four GPUs)(?:, [^.]+)?\. "
    r"(Expect \S.+\.|Not run to its end\..*)"
)


@pytest.mark.parametrize("path", GIN_FILES, ids=name)
def test_a_gin_file_says_how_to_run_it_and_what_to_expect(path):
    if path.parent.name == "parts":  # no run by itself
        assert "to be included" in configs.leading_comment(path.read_text())
        others = "".join(p.read_text() for p in GIN_FILES if p != path)
        assert f"include '{path.name}'" in others, f"no file includes {name(path)}"
        return
    command, *lines = re.match(r"(#.*\n)+", path.read_text())[0].splitlines()
    flag = "" if path.name == "quickstart.gin" else f" --config_file={path.name}"
    assert re.fullmatch(rf"# python train\.py{re.escape(flag)}(?: --.+)?", command), command
    end = lines.index("#")
    result = RESULT.fullmatch(" ".join(line.removeprefix("# ") for line in lines[:end]))
    assert result, f"{name(path)} says after its command {lines[:end]}"
    assert result[2].startswith("Not run") == (path.parent.name == "not_run"), name(path)
    assert len(lines) > end + 1, f"{name(path)} does not say what it is"


def test_a_config_s_name_is_its_own():
    names = [path.stem for path in GIN_FILES]
    assert len(set(names)) == len(names)


def test_a_chain_of_includes_is_short():
    included = {p.name: re.findall(r"^include '(.+)'$", p.read_text(), re.M) for p in GIN_FILES}

    def depth(file):
        return 1 + max(map(depth, included[file]), default=0)

    assert max(map(depth, included)) <= 4
