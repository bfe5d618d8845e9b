"""Who may depend on whom: read from the #include lines of csrc and the imports of kvpush."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "python" / "kvpush"

# Layers from the bottom up: a module may include modules of its own layer and of those listed.
# A name stands for the module and for its parts: copy_plan_order.cpp belongs to copy_plan.
LAYERS: dict[str, set[str]] = {
    "values": {"check", "memory", "status", "types"},
    "clock": {"clock"},
    "pure": {"region", "copy_plan", "coverage", "message", "peer_info", "peering", "wire"},
    "rendezvous": {"rendezvous", "producer", "consumer"},
    "transport": {"transport"},
    "library": {"dynamic_library"},
    "fence": {"device_fence"},
    "engine": {"engine", "poster"},
    "thread": {"mailbox", "engine_thread"},
    "nixl": {"nixl"},
    "bindings": {"bindings"},
}
ALLOWED: dict[str, set[str]] = {
    "values": set(),
    "clock": {"values"},
    "pure": {"values"},
    "rendezvous": {"values", "clock", "pure"},  # of the clock, its types: see TIME_CALLS
    "transport": {"values", "pure"},
    "library": {"values"},
    "fence": {"values", "library"},
    "engine": {"values", "clock", "pure", "rendezvous", "transport", "fence"},
    "thread": {"values", "clock", "pure", "rendezvous", "transport", "fence", "engine"},
    "nixl": {"values", "clock", "pure", "transport", "library"},
    "bindings": {"values", "clock", "pure", "rendezvous", "transport", "fence", "engine", "thread",
                 "nixl"},
}  # fmt: skip


def layer_of(stem: str) -> str | None:
    """The layer of a module, by the longest name in the table that it is or begins with."""
    names = {name: layer for layer, names in LAYERS.items() for name in names}
    own = [name for name in names if stem == name or stem.startswith(f"{name}_")]
    return names[max(own, key=len)] if own else None


# Headers that bring time, threads, randomness or the operating system into a module.
IMPURE_HEADERS = {
    "atomic", "chrono", "condition_variable", "ctime", "dlfcn.h", "fstream", "future", "iostream",
    "mutex", "pthread.h", "random", "sys/random.h", "sys/time.h", "thread", "time.h", "unistd.h",
}  # fmt: skip
PURE_LAYERS = {"values", "pure", "rendezvous"}

# The state machines are told the time: clock.h gives them its types alone.
TIME_CALLS = r"\bmonotonic_now\b"

# A word of the source (comments and strings taken out), and the only modules that may use it.
RESERVED: list[tuple[str, set[str]]] = [
    (r"\bdl(open|sym|close|vsym)\b", {"dynamic_library"}),
    (
        r"\b(steady_clock|system_clock|high_resolution_clock|clock_gettime|gettimeofday)\b",
        {"clock"},
    ),
    (
        r"\b(random_device|mt19937\w*|default_random_engine|getrandom|s?rand(om)?|drand48)\s*[({]",
        set(),
    ),
    (r"\b(pybind11|Py_\w+|PyObject|PyGILState_\w+)\b", {"bindings"}),
    (r"\bstd::j?thread\b|\bpthread_create\b", {"engine_thread"}),
]


def modules() -> list[Path]:
    """The product's native sources: the simulator lives below csrc/sim and may do as it likes."""
    return sorted(p for p in CSRC.iterdir() if p.suffix in {".h", ".cpp"})


def code_of(path: Path) -> str:
    """The source without comments and string literals."""
    text = path.read_text()
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', " ", text, flags=re.DOTALL)


def includes_of(path: Path) -> tuple[set[str], set[str]]:
    """The headers included with quotation marks, and those with angle brackets."""
    text = path.read_text()
    own = set(re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, flags=re.MULTILINE))
    foreign = set(re.findall(r"^\s*#\s*include\s+<([^>]+)>", text, flags=re.MULTILINE))
    return own, foreign


def imports_of(path: Path) -> set[str]:
    """Top-level names of everything a Python file imports, at any depth of its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def kvpush_imports_of(path: Path) -> set[str]:
    """Full names of the kvpush modules a Python file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return {name for name in found if name.split(".")[0] == "kvpush"}


def test_there_is_something_to_check() -> None:
    assert len(modules()) > 5
    assert PACKAGE.joinpath("__init__.py").is_file()


def test_allowed_dependencies_form_no_circle() -> None:
    done: set[str] = set()
    for layer in LAYERS:
        assert ALLOWED[layer] <= done, f"{layer} may only depend on layers listed before it"
        done.add(layer)


@pytest.mark.parametrize("path", modules(), ids=lambda p: p.name)
class TestNativeModule:
    def test_belongs_to_a_layer(self, path: Path) -> None:
        assert layer_of(path.stem), f"{path.name}: give it a layer here and in docs/design.md"

    def test_includes_only_what_its_layer_may(self, path: Path) -> None:
        layer = layer_of(path.stem)
        assert layer is not None
        own, _ = includes_of(path)
        for header in own:
            name = Path(header)
            assert name.parts[0] != "sim", f"{path.name} includes the simulator's {header}"
            other = layer_of(name.stem)
            assert other is not None, f"{path.name} includes {header}, which belongs to no layer"
            assert other == layer or other in ALLOWED[layer], (
                f"{path.name} ({layer}) includes {header} ({other})"
            )

    def test_pure_layers_know_no_time_thread_or_system(self, path: Path) -> None:
        if layer_of(path.stem) not in PURE_LAYERS:
            return
        _, foreign = includes_of(path)
        assert not foreign & IMPURE_HEADERS

    def test_pure_layers_are_told_the_time(self, path: Path) -> None:
        if layer_of(path.stem) in PURE_LAYERS:
            assert not re.search(TIME_CALLS, code_of(path))

    def test_reserved_words(self, path: Path) -> None:
        code = code_of(path)
        for pattern, owners in RESERVED:
            hits = {hit.group() for hit in re.finditer(pattern, code)}
            assert not hits or path.stem in owners, f"{path.name} uses {sorted(hits)}"

    def test_only_bindings_includes_pybind11(self, path: Path) -> None:
        _, foreign = includes_of(path)
        python = {h for h in foreign if h.startswith("pybind11/") or h == "Python.h"}
        assert not python or path.stem == "bindings"


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
class TestPythonModule:
    def test_only_the_adapter_imports_vllm(self, path: Path) -> None:
        if path.relative_to(PACKAGE).parts[0] == "vllm":
            return
        assert not imports_of(path) & {"vllm", "torch", "nixl", "transformers"}

    def test_only_the_adapter_is_built_on_the_adapter(self, path: Path) -> None:
        if path.relative_to(PACKAGE).parts[0] == "vllm":
            return
        assert not {n for n in kvpush_imports_of(path) if n.startswith("kvpush.vllm")}

    def test_the_router_knows_no_engine(self, path: Path) -> None:
        if path.relative_to(PACKAGE).parts[0] == "proxy":
            assert "kvpush._core" not in kvpush_imports_of(path)


def test_importing_kvpush_loads_no_heavy_package() -> None:
    code = (
        "import sys, kvpush\n"
        "heavy = {'vllm', 'torch', 'nixl', 'nixl_cu12', 'nixl_cu13', 'kvpush.vllm'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
