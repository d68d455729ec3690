"""Every block of code on the users' pages is run by a test, or has a reason why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, USERS_PAGES, Block, blocks_of

#: What no program reads.
SHOWN = ("json", "text")
BLOCKS = [block for path in USERS_PAGES for block in blocks_of(path) if block.language not in SHOWN]

ANTHROPIC = "tests/compat/test_anthropic_python.py"
MODELS = "tests/docs/test_models.py"
OPENAI = "tests/compat/test_openai_python.py"
OPERATORS = "tests/docs/test_operators.py"
SHELL = "tests/docs/test_shell.py"
DOCKER = "tests/deploy/test_docker_commands.py"
REPLICAS = "tests/deploy/test_scale_page.py"
SETTINGS = "tests/server/cluster/test_page_settings.py"
SYSTEMD = "tests/deploy/test_systemd.py"
#: Tests that look for such blocks on all pages.
OF_ALL_PAGES = (SHELL, DOCKER, REPLICAS, MODELS)

#: Page -> language, or how the first line begins -> the test that runs it.
RUN = {
    "README.md": {
        "curl": SHELL,
        "docker": DOCKER,
        ".venv/bin/everstream generate": "tests/docs/test_readme.py",
        # Its flags there; the same model is served by test_first_chat.py.
        ".venv/bin/everstream serve": SHELL,
        "python": OPENAI,
    },
    "docs/background/mechanisms.md": {"everstream": MODELS},
    "docs/models/arwkv.md": {"everstream": MODELS},
    "docs/models/jamba.md": {"everstream": MODELS},
    "docs/models/lfm2.md": {"everstream": MODELS},
    "docs/models/lfm3.md": {"everstream": MODELS},
    "docs/models/llama.md": {"everstream": MODELS},
    "docs/models/mamba.md": {"everstream": MODELS},
    "docs/models/mamba2-hybrids.md": {"everstream": MODELS},
    "docs/models/qwen3.5.md": {"everstream": MODELS},
    "docs/models/rwkv7.md": {"everstream": MODELS},
    "docs/operate/backup.md": {
        "everstream store": OPERATORS,
        "cp -a": OPERATORS,
        "pg_dump": "tests/reliability/test_backup.py",
        "pg_restore": "tests/reliability/test_backup.py",
    },
    "docs/operate/deploy.md": {
        "docker": DOCKER,
        "kubectl create": REPLICAS,
        "curl -X POST": OPERATORS,
    },
    "docs/operate/kubernetes.md": {
        "yaml": "tests/deploy/test_published_model.py",
        "docker": DOCKER,
        "openssl": REPLICAS,
        "PASSWORD=": REPLICAS,
    },
    "docs/operate/monitoring.md": {"yaml": "tests/deploy/test_observe.py"},
    "docs/operate/postgresql.md": {
        "haproxy": "tests/deploy/test_compose_cluster.py",
        "export": SETTINGS,
        "everstream serve --prefix-disk": SETTINGS,
    },
    "docs/operate/proxy.md": {"export": SETTINGS, "caddyfile": "tests/deploy/test_caddy.py"},
    "docs/operate/ray.md": {"openssl": REPLICAS},
    "docs/operate/serve-models.md": {
        "everstream pull": OPERATORS,
        "mkdir": OPERATORS,
        "everstream serve --model small": OPERATORS,
        "curl -X POST": OPERATORS,
    },
    "docs/operate/settings.md": {"toml": "tests/server/config/test_file.py"},
    "docs/operate/tenants.md": {
        "console": OPERATORS,
        "toml": "tests/server/api/test_tenants_keys.py",
    },
    "docs/operate/upgrade.md": {"everstream store": OPERATORS},
    "docs/start/first-chat.md": {
        "everstream": "tests/docs/test_first_chat.py",
        "curl": "tests/docs/test_first_chat.py",
        "ID=": "tests/docs/test_first_chat.py",
        "kill": "tests/docs/test_first_chat.py",
        "python": OPENAI,
    },
    "docs/start/install.md": {"docker": DOCKER},
    "docs/start/models.md": {"everstream": MODELS},
    "docs/use/anthropic.md": {"everstream serve": MODELS, "python": ANTHROPIC},
    "docs/use/chat.md": {"curl": SHELL, "everstream serve": "tests/docs/test_chat.py"},
    "docs/use/clients-python.md": {
        "pip install": "tests/docs/test_clients_python.py",
        "python": "tests/docs/test_clients_python.py",
    },
    "docs/use/durable-streams.md": {
        "curl": "tests/compat/test_durable_streams.py",
        "js": "tests/compat/test_durable_streams.py",
    },
    "docs/use/examples.md": {
        "python -m": "tests/docs/test_clients_python.py",
        "for i": "tests/docs/test_clients_python.py",
        'echo "zq': "tests/docs/test_clients_python.py",
    },
    "docs/use/move-an-application.md": {
        "everstream serve": OPENAI,
        "export": OPENAI,
        "python": OPENAI,
    },
    "docs/use/named-states.md": {
        "everstream state make": OPERATORS,
        "curl http": OPERATORS,
        "curl -X POST": OPERATORS,
    },
    "docs/use/responses.md": {"curl": SHELL, "python": OPENAI},
    "docs/use/structured-output.md": {"curl": SHELL},
    "docs/use/terminal.md": {
        "everstream state": OPERATORS,
        "everstream": "tests/docs/test_terminal.py",
    },
}

ROOT_ONLY = "changes the machine as root"
NO_CLUSTER = "asks a cluster; the manifests are checked by tests/deploy"

#: The same -> why no test runs it. `everstream` in such a block is read by test_shell.py.
NOT_RUN = {
    "README.md": {"make": "installs an environment; tests/test_makefile.py has make's own tests"},
    "docs/operate/deploy.md": {"sudo": f"{ROOT_ONLY}; {SYSTEMD} has the units"},
    "docs/operate/kubernetes.md": {"kubectl apply": NO_CLUSTER},
    "docs/operate/postgresql.md": {
        "sudo": ROOT_ONLY,
        ". .venv": "installs into the environment that runs the tests",
    },
    "docs/operate/proxy.md": {
        "yaml": "the page says that it is not tested",
    },
    "docs/operate/ray.md": {
        "pip": "installs into the environment that runs the tests",
        "RAY_": "serves until it is stopped; tests/server/cluster/ray deploys the file",
    },
    "docs/start/install.md": {
        "PIP_EXTRA_INDEX_URL": "installs torch, from an index that the reader names",
        "make": "installs an environment; tests/test_makefile.py has make's own tests",
        "python3 -m venv": "takes minutes; `make docker-check` does it",
        "everstream-env": "takes minutes; tests/test_packaging.py has the extras",
    },
    "docs/use/anthropic.md": {"export": "starts Claude Code; the page says how it was run"},
    "docs/use/examples.md": {". .venv": "serves until it is stopped"},
}


def keys_of(block: Block) -> list[tuple[str, str]]:
    """The entries for a block, as page and key; the longest key first."""
    keys = {
        key
        for table in (RUN, NOT_RUN)
        for key in table.get(block.page, {})
        if key == block.language or block.first.startswith(key)
    }
    return [(block.page, key) for key in sorted(keys, key=len, reverse=True)]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}: {block.first[:30]}")
def test_block_is_run_or_has_a_reason(block: Block) -> None:
    assert keys_of(block)


def test_every_entry_is_of_a_block() -> None:
    used = {keys[0] for block in BLOCKS if (keys := keys_of(block))}
    assert used == {
        (page, key) for table in (RUN, NOT_RUN) for page in table for key in table[page]
    }


@pytest.mark.parametrize("page", RUN)
def test_tests_of_a_page_name_it(page: str) -> None:
    for test in RUN[page].values():
        named = Path(page).name in (ROOT / test).read_text("utf-8")
        assert named or test in OF_ALL_PAGES, test
