"""The tests run the code of the checkout that they are in, whatever the environment has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import model
import server
from tests.own_tree import sitecustomize

ROOT = Path(__file__).parent.parent


class OtherCheckout:
    search_paths = ("/elsewhere",)

    def find_spec(self, *_: object) -> None:
        return None


def test_packages_are_those_of_this_checkout() -> None:
    for package in (server, model):
        assert Path(str(package.__file__)).parent.parent == ROOT


@pytest.mark.process
def test_packages_of_a_child_process_are_those_of_this_checkout() -> None:
    code = "import model, server; print(model.__file__, server.__file__)"
    found = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).split()
    assert [Path(file).parent.parent for file in found] == [ROOT, ROOT]


def test_finder_of_another_checkout_is_taken_out() -> None:
    finders, path = [OtherCheckout(), *sys.meta_path], ["/elsewhere"]
    environment = {"PYTHONPATH": "/before"}
    sitecustomize.use_own_tree(finders, path, environment)
    assert finders == sys.meta_path
    assert path == [str(ROOT), "/elsewhere"]
    assert environment["PYTHONPATH"].split(os.pathsep)[::2] == [str(ROOT), "/before"]
