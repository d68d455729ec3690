from __future__ import annotations

import os
from pathlib import Path

from tests.empty_home import MOVED, EmptyHome


def test_tests_run_in_a_home_of_their_own() -> None:
    assert Path.home().name.startswith("everstream-home-")
    assert not os.environ.keys() & set(MOVED)


def test_home_is_empty_and_settings_of_tools_stay(tmp_path: Path) -> None:
    (tmp_path / ".npmrc").write_text("registry=x")
    (tmp_path / ".cache").mkdir()
    environment = {"HOME": str(tmp_path), "PIP_CACHE_DIR": "kept", "PATH": "here"}
    home = EmptyHome(environment)
    assert list(home.path.iterdir()) == []
    assert environment == {
        "HOME": str(home.path),
        "NPM_CONFIG_USERCONFIG": str(tmp_path / ".npmrc"),
        "PATH": "here",
    }
    home.close()
    assert not home.path.exists()
