"""The rules of import, checked on the syntax tree: what each part may know, and what none may use.

The rules are in docs/contribute/architecture.md. A file is read, never run, so an import inside a
function counts like one at the top.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("model", "server", "clients")
READ_FOLDERS = (*PACKAGES, "tests", "benchmarks", "docs")


@dataclass(frozen=True)
class Rule:
    """Modules under ``inside`` import nothing under ``never``, save what is under ``but``."""

    inside: tuple[str, ...]
    never: tuple[str, ...]
    but: tuple[str, ...] = ()
    except_in: tuple[str, ...] = ()


#: The server's layers from the top down: each imports itself and what stands below it.
LAYERS = (
    *("cli", "cluster", "http", "api", "models", "sessions", "runtime", "constraints", "chat"),
    *("workers", "store", "observability", "engine", "config", "errors"),
)

#: The same of the units of `server/api`: its folders, and its modules outside of them.
API_LAYERS = (
    *("app", "openai", "routes", "middleware", "websocket", "durable_streams", "events"),
    *("request_answer", "watched", "frames", "completion", "streaming", "translate", "auth"),
    *("errors", "schemas"),
)

#: The same of the units of `model`: its folders, and its modules outside of them.
MODEL_LAYERS = (
    *("convert", "training", "export", "quantization", "bounds", "checkpoint", "adapted", "hub"),
    "foreign",
    *("command_line", "native", "lm", "block", "config", "checkpoint_files", "weights"),
    "state_tensors",
    *("state", "attention", "evaluation", "architectures", "tokenizer", "tokenization", "chat"),
    *("ops", "memory", "bundled_models", "tensor_spec", "files"),
)

#: The lists of layers by the package whose units they are.
LAYERS_OF = {"server": LAYERS, "server.api": API_LAYERS, "model": MODEL_LAYERS}

RULES = (
    *(
        Rule(
            inside=(f"{package}.{unit}",),
            never=tuple(f"{package}.{above}" for above in layers[:height]),
        )
        for package, layers in LAYERS_OF.items()
        for height, unit in enumerate(layers)
    ),
    Rule(inside=("model",), never=("server", "clients")),
    Rule(inside=("clients",), never=("server", "model")),
    Rule(inside=("server",), never=("clients", "model.training", "model.convert")),
    Rule(
        inside=("server.engine",),
        never=("asyncio", "threading", "socket", "time", "concurrent", "multiprocessing"),
    ),
    Rule(inside=("server.engine", "server.errors"), never=("server.config",)),
    Rule(inside=("server.errors",), never=("server",)),
    Rule(inside=("server.engine.scheduler", "server.engine.request"), never=("torch",)),
    Rule(
        inside=("server.api",),
        never=("server.engine",),
        but=(
            *("server.engine.types", "server.engine.sampling", "server.engine.prefixes"),
            "server.engine.text",
        ),
    ),
    Rule(inside=("server.config",), never=("server",), but=("server.config",)),
    Rule(inside=("server",), never=("apsw", "psycopg"), except_in=("server.store",)),
)

#: `server.engine` may use these and the standard library.
ENGINE_LIBRARIES = ("model", "numpy", "server", "torch")

#: What `everstream serve` imports on its way to the first token of the native runtime, or may.
ON_THE_NATIVE_WAY = (
    *("model.config", "model.attention", "model.state", "model.tokenizer", "model.weights"),
    *("model.checkpoint", "model.foreign.gpt2", "model.foreign.llama"),
    *("model.foreign.flash_linear_attention", "model.native.runtime"),
    *("model.architectures", "model.architectures.rwkv7.config", "model.foreign.rwkv7"),
    *("model.weights.folder", "model.weights.safetensors", "model.weights.torch_file"),
    *("model.weights.gguf_file", "model.weights.gguf_kinds", "model.weights.gguf_parts"),
    "model.tokenization.gguf",
    "model.export.cli",
    *("model.foreign.rwkv7_gguf", "model.foreign.arwkv7", "model.foreign.arwkv7_gguf"),
    *("model.foreign.mamba", "model.foreign.mamba_gguf"),
    *("server.engine.engine", "server.engine.scheduler", "server.engine.runner"),
    *(
        "server.engine.tables",
        "server.engine.runner",
        "server.models.backend",
        "server.cli.main",
        "server.cli.serve",
        "server.cli.generate",
    ),
    *(
        "server.cli.inspect",
        "server.config.settings",
        "server.http.server",
        "server.runtime.async_engine",
    ),
    *("server.observability.metrics", "server.api.app", "server.models.service"),
)
#: What none of them may import: slow, or not in every image.
NOT_ON_THE_NATIVE_WAY = (
    *("torch", "transformers", "huggingface_hub", "matplotlib", "httpx", "rich", "gguf"),
    *("clients", "model.lm", "model.training", "model.convert"),
)

#: Code that a file could carry into the process, by the full name of what runs it.
UNSAFE = (
    *(
        "eval",
        "exec",
        "__import__",
        "pickle",
        "cPickle",
        "_pickle",
        "dill",
        "cloudpickle",
        "joblib",
    ),
    *("marshal", "shelve", "torch.load", "torch.save", "torch.jit.load", "torch.hub"),
    *("torch.package", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"),
    *("allow_pickle", "pandas.read_pickle"),
)

#: What others read is written by torch itself, which runs nothing that it holds; expressions of
#: benchmarks/claims are part of the tests.
WRITERS = {
    "tests/rwkv7.py": ("torch.save",),
    "model/export/rwkv7.py": ("torch.save",),
    "tests/docs/claims.py": ("eval",),
}

#: The only readers of the environment. The second finds the cache of the hub's library, which has
#: not been installed yet where it runs first.
ENVIRONMENT_READERS = ("server.config.settings", "model.hub.base")
ENVIRONMENT = ("os.environ", "os.environb", "os.getenv", "os.putenv")


def test_imports_follow_the_rules() -> None:
    broken = [line for name, tree in modules() for line in broken_rules(name, tree)]
    assert broken == []


@pytest.mark.parametrize(("package", "layers"), LAYERS_OF.items(), ids=LAYERS_OF)
def test_every_module_is_in_a_layer(package: str, layers: tuple[str, ...]) -> None:
    root = ROOT.joinpath(*package.split("."))
    found = {path.relative_to(root).parts[0].removesuffix(".py") for path in root.rglob("*.py")}
    assert found == {"__init__", *layers}
    assert len(layers) == len(set(layers))


@pytest.mark.parametrize("package", LAYERS_OF)
def test_no_units_of_a_package_import_each_other(package: str) -> None:
    """A unit is a folder of the package, or a module that is in none."""
    found = components(unit_graph(package, import_graph(dict(modules()))))
    print(f"{package}: components of {sorted(map(len, found), reverse=True)} units")
    assert [units for units in found if len(units) > 1] == []


def test_units_that_import_each_other_are_shown() -> None:
    graph = {
        "model.a.one": {"model.b"},
        "model.b": {"model.c.two", "server.d"},
        "model.c.two": {"model.a.three"},
        "model.a.three": {"model.e"},
        "model.e": set[str](),
    }
    assert components(unit_graph("model", graph)) == [["a", "b", "c"], ["e"]]


def test_no_module_imports_itself_through_others() -> None:
    """Imports in functions and under TYPE_CHECKING count as well."""
    cycle = cycle_in(import_graph(dict(modules())))
    assert not cycle, " imports ".join(cycle)


def test_a_cycle_is_shown() -> None:
    sources = {
        "server.a": "def f():\n    from server import b",
        "server.b": "if TYPE_CHECKING:\n    from server.c import C",
        "server.c": "from . import a, d",
        "server.d": "import json",
    }
    graph = import_graph({name: ast.parse(text) for name, text in sources.items()})
    cycle = cycle_in(graph)
    assert cycle[0] == cycle[-1]
    assert set(cycle) == {"server.a", "server.b", "server.c"}
    assert cycle_in({name: graph[name] - {"server.a"} for name in graph}) == []


@pytest.mark.process
def test_native_way_imports_nothing_slow() -> None:
    """In a process of its own; the first module that brings one in is named."""
    code = f"""
import importlib, json, sys
brought = {{}}
for name in {ON_THE_NATIVE_WAY}:
    importlib.import_module(name)
    for slow in {NOT_ON_THE_NATIVE_WAY}:
        if slow in sys.modules:
            brought.setdefault(slow, name)
print(json.dumps(brought))
"""
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
    assert json.loads(output) == {}


def test_engine_uses_numpy_torch_and_the_standard_library_alone() -> None:
    foreign = [
        f"{name} imports {target}"
        for name, tree in modules()
        if under(name, ("server.engine",))
        for target in imports(tree)
        if not is_engine_library(target)
    ]
    assert foreign == []


def test_scheduler_and_lifecycle_reach_no_torch() -> None:
    known = dict(modules())
    start = {"server.engine.scheduler", "server.engine.request"} & known.keys()
    reached = reachable(start, known)
    assert start
    assert not {target for target in reached if under(target, ("torch",))}, reached


def test_distributed_is_imported_lazily() -> None:
    eager = [
        t for name, tree in modules() if under(name, ("server.cli",)) for t in eager_imports(tree)
    ]
    assert not [target for target in eager if under(target, ("server.cluster",))]


def test_eager_and_lazy_imports_are_told_apart() -> None:
    source = "if x:\n    import a\ndef f():\n    import b\nasync def g():\n    import c"
    assert list(eager_imports(ast.parse(source))) == ["a"]


def test_nothing_runs_code_from_data() -> None:
    used = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in source_files()
        for line, name in uses(ast.parse(path.read_bytes(), str(path)), UNSAFE)
        if name not in WRITERS.get(str(path.relative_to(ROOT)), ())
    ]
    assert used == []


def test_only_the_config_reads_the_environment() -> None:
    readers = [
        f"{name}:{line}: {what}"
        for name, tree in modules()
        if not under(name, ENVIRONMENT_READERS)
        for line, what in uses(tree, ENVIRONMENT)
    ]
    assert readers == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("model.lm", "import server.engine"),
        ("model.lm", "from server import engine"),
        ("model.lm", "def f():\n    from clients.python import Client"),
        ("model.block", "from model import training"),
        ("model.block", "from .training.loop import train"),
        ("model.hub.cache", "from model.checkpoint import Checkpoint"),
        ("model.tokenizer", "from model.hub.names import parse_name"),
        ("clients.bench.load", "from model.tokenizer import Tokenizer"),
        ("server.api.routes.server", "from clients.bench import load"),
        ("server.cli.main", "from model.training.cli import train_command"),
        ("server.runtime.async_engine", "from server.cli.main import main"),
        ("server.runtime.async_engine", "from server.api.app import create_app"),
        ("server.api.app", "from server.cluster import ray_serve"),
        ("server.api.errors", "from server.api.auth import Caller"),
        ("server.api.routes.server", "from server.engine.engine import Engine"),
        ("server.api.routes.server", "from server.engine import engine"),
        ("server.engine.engine", "import time"),
        ("server.engine.engine", "from asyncio import Queue"),
        ("server.engine.engine", "from server.runtime import async_engine"),
        ("server.engine.runner", "from model.training.loop import train"),
        ("server.engine.scheduler", "from torch import Tensor"),
        ("server.config.settings", "from server.runtime.async_engine import AsyncEngine"),
        ("server.cli.store", "import apsw"),
        ("server.cluster.shared", "from psycopg import sql"),
    ],
)
def test_a_broken_rule_is_seen(module: str, source: str) -> None:
    assert broken_rules(module, ast.parse(source)) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("model.training.loop", "from model.lm import LanguageModel"),
        ("model.checkpoint", "def f():\n    from model.hub.pull import pull"),
        ("model.block", "from model import training_free"),
        ("server.cli.main", "def f():\n    from server.cluster import ray_serve"),
        ("server.runtime.async_engine", "import time\nfrom server.engine.engine import Engine"),
        ("server.api.routes.server", "from server.engine.types import Request"),
        ("server.engine.engine", "import torch\nfrom server.engine import scheduler"),
    ],
)
def test_what_the_rules_allow_passes(module: str, source: str) -> None:
    assert broken_rules(module, ast.parse(source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from torch import load",
        "import torch\ntorch.load('x')",
        "import torch as t\nread = t.load",
        "from torch import save as keep\nkeep(1, 2)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import yaml\nyaml.load('x')",
        "eval('1')",
        "__builtins__.exec('1')",
        "import builtins\nbuiltins.eval('1')",
    ],
)
def test_unsafe_code_is_seen(source: str) -> None:
    assert list(uses(ast.parse(source), UNSAFE)) != []


def test_safe_namesakes_pass() -> None:
    source = "model.eval()\nre.compile('x')\njson.load(file)\nyaml.safe_load('x')\nself.load(1)"
    assert list(uses(ast.parse(source), UNSAFE)) == []


@pytest.mark.parametrize("library", ["scipy", "fastapi", "pydantic.fields"])
def test_a_foreign_library_in_the_engine_is_seen(library: str) -> None:
    assert not is_engine_library(library)


def test_torch_is_seen_through_other_modules() -> None:
    known = {
        "server.engine.scheduler": ast.parse("from server.engine import types"),
        "server.engine.types": ast.parse("from torch import Tensor"),
    }
    assert "torch.Tensor" in reachable({"server.engine.scheduler"}, known)


def under(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether the dotted ``name`` is one of ``prefixes`` or inside one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def broken_rules(name: str, tree: ast.Module) -> list[str]:
    """A line for each import of module ``name`` that a rule forbids."""
    return [
        f"{name} imports {target}"
        for rule in RULES
        if under(name, rule.inside) and not under(name, rule.except_in)
        for target in imports(tree, name)
        if under(target, rule.never) and not under(target, rule.but)
    ]


def is_engine_library(target: str) -> bool:
    """Whether ``server.engine`` may import ``target`` as far as libraries go."""
    top = target.partition(".")[0]
    return top in ENGINE_LIBRARIES or top in sys.stdlib_module_names


def imports(tree: ast.AST, name: str = "") -> Iterator[str]:
    """Every imported name in full; ``from a import b`` counts as ``a.b``, module or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{base_of(node, name)}.{alias.name}" for alias in node.names)


def base_of(node: ast.ImportFrom, name: str) -> str:
    """The module that ``from ... import`` names, a relative one counted from module ``name``."""
    if not node.level:
        return node.module or ""
    parents = name.split(".")[: -node.level]
    return ".".join([*parents, *([node.module] if node.module else [])])


def import_graph(known: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Which of the ``known`` modules each of them names in an import."""
    packages = {name.rpartition(".")[0] for name in known}
    graph: dict[str, set[str]] = {}
    for name, tree in known.items():
        inside = f"{name}.__init__" if name in packages else name
        named = (module for t in imports(tree, inside) for module in named_by(t, known))
        graph[name] = set(named) - {name}
    return graph


def named_by(target: str, known: dict[str, ast.Module]) -> set[str]:
    """The module of ``known`` that ``target`` is, or that holds it."""
    parent = target.rpartition(".")[0]
    return {target} & known.keys() or {parent} & known.keys()


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, the first again at the end; empty where there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def unit_graph(package: str, graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Which units of ``package`` each of them imports, from a graph of modules."""

    def unit(module: str) -> str:
        return module.removeprefix(f"{package}.").partition(".")[0]

    inside = [name for name in graph if name.startswith(f"{package}.")]
    units: dict[str, set[str]] = {unit(name): set() for name in inside}
    for name in inside:
        units[unit(name)] |= {unit(one) for one in graph[name] if one.startswith(f"{package}.")}
    return units


def components(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of a graph, each sorted, in the order of their firsts."""

    def reached(start: str) -> set[str]:
        seen, todo = set[str](), [start]
        while todo:
            targets = graph[todo.pop()] - seen
            seen |= targets
            todo += targets
        return seen | {start}

    reach = {name: reached(name) for name in graph}
    found = {tuple(sorted(o for o in reach[n] if n in reach[o])) for n in graph}
    return sorted(map(list, found))


def eager_imports(tree: ast.Module) -> Iterator[str]:
    """The imports that run when the module is imported, those in functions left out."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports(node)


def reachable(start: set[str], known: dict[str, ast.Module]) -> set[str]:
    """All that importing ``start`` imports, through the modules in ``known`` and their packages."""
    seen: set[str] = set()
    todo = set(start)
    while todo:
        name = todo.pop()
        seen.add(name)
        parts = name.split(".")
        chain = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
        for module in (m for m in chain if m in known):
            todo |= {module, *imports(known[module], module)} - seen
    return seen


def uses(tree: ast.Module, names: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Line and full name of each import, reference or keyword argument that ``names`` has."""
    full = dict(aliases(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, t) for t in imports(node) if under(t, names))
        elif isinstance(node, ast.keyword) and node.arg in names:
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute | ast.Name):
            name = dotted(node, full)
            for prefix in ("builtins.", "__builtins__."):
                name = name.removeprefix(prefix)
            if name in names:
                yield node.lineno, name


def aliases(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Pairs of a local name and what it was imported as."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.asname, a.name) for a in node.names if a.asname)
        elif isinstance(node, ast.ImportFrom):
            yield from ((a.asname or a.name, f"{node.module}.{a.name}") for a in node.names)


def dotted(node: ast.expr, full: dict[str, str]) -> str:
    """``np.load`` as ``numpy.load``; empty for what is no chain of names."""
    if isinstance(node, ast.Name):
        return full.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        head = dotted(node.value, full)
        return f"{head}.{node.attr}" if head else ""
    return ""


def source_files() -> list[Path]:
    files = [path for folder in READ_FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert files, ROOT
    return files


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Name and tree of every module of the three packages."""
    for path in source_files():
        relative = path.relative_to(ROOT).with_suffix("")
        parts = relative.parts[:-1] if relative.name == "__init__" else relative.parts
        if parts[0] in PACKAGES:
            yield ".".join(parts), ast.parse(path.read_bytes(), str(path))
