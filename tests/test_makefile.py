"""What the tasks install and run. Stand-ins take the places of Python, pip and the compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent

#: Writes down what pip and pytest are asked for; the extension can be imported once it was built.
PYTHON = """#!/bin/sh
case "$*" in
  "-m pip install"*)
    echo "$*" >> "$LOG"
    case "$*" in *--requirement*) cat >> "$LOG"; echo >> "$LOG";; esac
    if command -v g++ >/dev/null; then touch "$TREE/built"; fi;;
  "deploy/bundled-pip"*) echo "$*" >> "$LOG";;
  "deploy/requirements"*) printf "packages of [%s]" "$2";;
  "deploy/progress"*) shift; for command; do sh -c "$command" || exit; done;;
  "-m model.hub.base"*)
    echo "$*" >> "$LOG"
    if test -n "$OFFLINE"; then echo "smollm2: no network"; exit 2; fi;;
  "-m pytest"*) for word; do echo "$word"; done >> "$LOG";;
  *_native*) test -e "$TREE/built";;
  *) echo header;;
esac
"""


EVERSTREAM = """#!/bin/sh
echo "$@" > "$SERVED"
echo serves
"""


#: What an install is redone for.
INSTALLED_BY = (
    "constraints.txt",
    "model/ops/cpu/cmake/CMakeLists.txt",
    "pyproject.toml",
    "tests/oracle-packages.txt",
)


class Tree:
    """A source tree with an environment in which nothing is installed yet."""

    def __init__(self, path: Path) -> None:
        self.path, self.log = path, path / "log"
        shutil.copy(ROOT / "Makefile", path)
        for name in INSTALLED_BY:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).touch()
        self.tools = path / "tools"
        self.tools.mkdir()
        for name in ("sh", "touch", "cmp", "rm", "test", "make", "sed", "expand", "cat"):
            (self.tools / name).symlink_to(shutil.which(name) or name)
        (path / ".venv/bin").mkdir(parents=True)
        self._script(path / ".venv/bin/python", PYTHON)
        self._script(
            path / ".venv/bin/everstream", '#!/bin/sh\necho "$@" > "$SERVED"\necho serves\n'
        )

    def _script(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def add_compiler(self) -> None:
        self._script(self.tools / "g++", "#!/bin/sh\n")

    def served(self, *arguments: str, **variables: str) -> list[str]:
        """The command that `make serve` runs."""
        self.serve(*arguments, **variables)
        return (self.path / "served").read_text().split()

    def serve(self, *arguments: str, **variables: str) -> tuple[list[str], str]:
        """What pip was asked for, and what was said."""
        said = self.make("serve", *arguments, **variables)
        assert said.endswith("serves\n")
        return self.log.read_text().splitlines(), said

    def make(self, *arguments: str, **variables: str) -> str:
        """What is said; the log begins anew."""
        self.log.write_text("")
        environment = {"PATH": str(self.tools), "LOG": str(self.log), "TREE": str(self.path)}
        environment |= {"SERVED": str(self.path / "served"), **variables}
        done = subprocess.run(
            [self.tools / "make", *arguments],
            cwd=self.path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


def projects(asked: list[str]) -> list[str]:
    """What pip was asked to install of the tree, and of which extras the packages, in order."""
    return [line.rpartition(" ")[2] for line in asked if line.endswith((" .", "]"))]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_with_a_compiler_torch_is_not_installed(tree: Tree) -> None:
    tree.add_compiler()
    asked, said = tree.serve()
    assert asked[0].startswith("deploy/bundled-pip install") and asked[0].endswith("--upgrade pip")
    assert projects(asked) == [".", "[]"]
    assert "MB to download" in said
    assert "torch" not in said


def test_tests_are_installed_with_what_they_compare_with(tree: Tree) -> None:
    tree.add_compiler()
    tree.make(".venv/.installed-dev")
    asked = tree.log.read_text().splitlines()
    assert projects(asked) == [".", "[dev]"]
    assert asked[-2].endswith("--no-deps --requirement tests/oracle-packages.txt")


def test_install_says_how_far_it_is(tree: Tree) -> None:
    tree.add_compiler()
    _, said = tree.serve()
    assert [line[2:5] for line in said.splitlines()[1:-1]] == ["1/2", "2/2"]


def test_without_a_compiler_torch_is_installed_with_a_hint(tree: Tree) -> None:
    asked, said = tree.serve()
    assert projects(asked) == [".", "[]", "[torch]"]
    assert "Install a C++ compiler and Python's headers" in said
    assert "2.8 GB" in said


def test_a_compiler_that_was_added_is_used(tree: Tree) -> None:
    tree.serve()
    tree.add_compiler()
    asked, said = tree.serve()
    assert projects(asked) == [".", "[]"]
    assert "was not built" not in said


@pytest.mark.parametrize("has_compiler", [False, True])
def test_nothing_is_installed_twice(tree: Tree, has_compiler: bool) -> None:
    if has_compiler:
        tree.add_compiler()
    tree.serve()
    assert tree.serve() == ([], "serves\n")


STORIES = ["serve", "--model", "everstream-stories"]
FETCH = "-m model.hub.base model/bundled/smollm2"


def bundle(tree: Tree, *names: str) -> None:
    for name in names:
        folder = tree.path / "model" / "bundled" / name
        folder.mkdir(parents=True)
        (folder / "config.json").touch()


def test_default_is_served_alone_where_no_chat_model_is_bundled(tree: Tree) -> None:
    bundle(tree, "everstream-stories")
    assert tree.served() == STORIES
    assert tree.served("ARGS=--port 9000") == [*STORIES, "--port", "9000"]
    assert tree.served("ARGS=--model-dir x") == [*STORIES, "--model-dir", "x"]


def test_chat_model_is_served_first_and_its_base_fetched_while_compiling(tree: Tree) -> None:
    bundle(tree, "everstream-stories", "smollm2")
    tree.add_compiler()
    asked, said = tree.serve()
    packages = asked.index("packages of []")
    assert asked[packages + 1 :] == [FETCH, FETCH]  # and again before it is served
    assert "smollm2: 93 MB more" in said
    assert tree.served("ARGS=--port 9000")[1:] == [
        "--model",
        "smollm2",
        *STORIES[1:],
        "--port",
        "9000",
    ]
    assert tree.log.read_text().splitlines() == [FETCH]


def test_without_a_network_the_default_is_served_with_one_line(tree: Tree) -> None:
    bundle(tree, "everstream-stories", "smollm2")
    tree.add_compiler()
    tree.serve()
    _, said = tree.serve(OFFLINE="1")
    assert said == "smollm2: no network\nserves\n"
    assert (tree.path / "served").read_text().split() == STORIES


@pytest.mark.parametrize("own", ["--model runs/mine", "--config=file", "--served-model-name x"])
def test_model_of_the_caller_is_served_alone(tree: Tree, own: str) -> None:
    bundle(tree, "everstream-stories", "smollm2")
    assert tree.served(f"ARGS={own}") == ["serve", *own.split()]
    assert FETCH not in tree.log.read_text()
    assert tree.served(EVERSTREAM_MODEL="runs/mine") == ["serve"]


def test_test_runs_unit_tests_and_smoke_and_full_runs_all(tree: Tree) -> None:
    tree.add_compiler()
    tree.make(".venv/.installed-dev")
    tree.make("test", "ARGS=-x")
    asked = tree.log.read_text().splitlines()
    assert asked[:2] == ["-m", "pytest"]
    assert asked[asked.index("-m", 1) + 1] == "unit or smoke"
    assert asked[-1] == "-x"
    tree.make("full", "POSTGRES=here", "ARGS=-x")
    asked = tree.log.read_text().splitlines()
    assert asked.count("-m") == 1
    assert asked[-1] == "-x"
