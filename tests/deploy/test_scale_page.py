"""The commands of the pages on replicas name flags, variables, files and secrets that there are."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from server.config import ServerConfig
from tests.deploy.manifests import DEPLOY, Manifest, check, containers_of, kustomized, manifests_of
from tests.docs.blocks import SHELL, USERS_PAGES, Block, blocks_of
from tests.docs.pages import flags, page
from tests.requirements import needs_program

ROOT = DEPLOY.parent
TEXT = "\n".join(page(f"{name}.md") for name in ("postgresql", "kubernetes", "ray"))
#: Pasted as they stand: indented, and without prose.
COMMANDS = re.findall(r"^    (\S(?:.*\\\n)*.*)$", TEXT, re.MULTILINE)
#: Made of the other manifests' needs by `kubectl create secret`.
CLUSTER = [
    *kustomized(DEPLOY / "kubernetes" / "cluster"),
    *kustomized(DEPLOY / "kubernetes" / "example-postgresql"),
]
RAY = manifests_of(DEPLOY / "ray" / "kuberay.yaml")
#: Blocks that make passwords, certificates and secrets, on any page.
SECRETS = [
    block
    for path in USERS_PAGES
    for block in blocks_of(path)
    if block.language in SHELL and "kubectl create" in block.text
]
#: It makes nothing and asks no cluster.
DRY_KUBECTL = """kubectl() {
    [ "$1" != create ] || { command kubectl "$@" --dry-run=client --output yaml && echo ---; }
}
"""


def words_of(program: str) -> list[list[str]]:
    """The commands that begin with ``program``, as the shell has them."""
    split = [shlex.split(command) for command in COMMANDS]
    return [words for words in split if words[0] == program]


def test_flags_of_the_server_exist() -> None:
    served = [words for words in words_of("everstream") if words[1] == "serve"]
    used = {word for words in served for word in words if word.startswith("--")}
    assert used
    assert used <= flags("serve")


def test_flags_in_the_prose_exist() -> None:
    used = set(re.findall(r"`(--[a-z-]+)", TEXT))
    assert used
    assert used <= flags("serve")


def test_variables_exist() -> None:
    ours = {f"EVERSTREAM_{name.upper()}" for name in ServerConfig.model_fields}
    used = set(re.findall(r"EVERSTREAM_[A-Z_]+", TEXT))
    assert used
    assert used <= ours


def test_files_exist() -> None:
    files = {word for command in COMMANDS for word in shlex.split(command) if "deploy/" in word}
    assert files
    for file in files:
        assert (ROOT / file).exists(), file


def keys_wanted(template: Manifest) -> set[tuple[str, str]]:
    """The secrets that a pod refers to, and their keys; those that it cannot do without."""
    spec = template["spec"]
    variables = [one for each in containers_of(spec) for one in each.get("env", ())]
    found = [one.get("valueFrom", {}).get("secretKeyRef", {}) for one in variables]
    wanted = {(one["name"], one["key"]) for one in found if one and not one.get("optional")}
    for volume in spec["volumes"]:
        secret = volume.get("secret")
        if secret is not None and not secret.get("optional"):
            wanted |= {(secret["secretName"], key) for key in ("tls.crt", "tls.key")}
    return wanted


def keys_made() -> set[tuple[str, str]]:
    made = set()
    for words in words_of("kubectl"):
        if words[1:3] != ["create", "secret"]:
            continue
        kind, name, *options = words[3:]
        if kind == "tls":
            made |= {(name, "tls.crt"), (name, "tls.key")}
        for option in options:
            if found := re.match(r"--from-(?:literal|file)=([^=]+)=", option):
                made.add((name, found[1]))
    return made


def templates(manifests: list[Manifest]) -> list[Manifest]:
    found = []
    for one in manifests:
        spec = one.get("spec", {})
        if "rayClusterConfig" in spec:
            cluster = spec["rayClusterConfig"]
            found += [cluster["headGroupSpec"]["template"]]
            found += [group["template"] for group in cluster["workerGroupSpecs"]]
        elif "template" in spec:
            found.append(spec["template"])
    return found


@pytest.mark.parametrize("manifests", [CLUSTER, RAY], ids=["cluster", "ray"])
def test_the_guide_makes_every_secret_that_is_wanted(manifests: list[Manifest]) -> None:
    found = templates(manifests)
    assert len(found) == 2
    for template in found:
        assert keys_wanted(template) <= keys_made()


def test_the_authority_of_the_url_is_where_it_is_mounted() -> None:
    (place,) = set(re.findall(r"sslrootcert=(/[^\s\"&]+)", TEXT))
    folder, _, file = place.rpartition("/")
    for template in templates(CLUSTER[:2]) + templates(RAY):
        (main,) = template["spec"]["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in main["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert volumes[mounts[folder]]["secret"]["items"] == [{"key": file, "path": file}]


def test_labels_of_namespaces_are_those_of_the_policies() -> None:
    labels = {
        tuple(words[-1].split("=")) for words in words_of("kubectl") if words[1:2] == ["label"]
    }
    policies = [one for one in CLUSTER + RAY if one["kind"] == "NetworkPolicy"]
    wanted = {
        item
        for policy in policies
        for rule in policy["spec"].get("ingress", ())
        for peer in rule["from"]
        for item in peer.get("namespaceSelector", {}).get("matchLabels", {}).items()
    }
    assert labels == wanted


@needs_program("kubectl", "kubernetes-client")
@pytest.mark.parametrize("block", SECRETS, ids=lambda block: block.first.partition(" -")[0])
def test_secrets_are_made_as_a_cluster_takes_them(block: Block, tmp_path: Path) -> None:
    """With the certificate of the first block, where it needs one."""
    text = block.text
    if "openssl req" not in text:
        first = next(each for each in SECRETS if "CN=everstream-postgresql" in each.text)
        text = f"{first.text.splitlines()[0]}\n{text}"
    done = subprocess.run(
        ["bash", "-ec", DRY_KUBECTL + text], cwd=tmp_path, check=True, stdout=subprocess.PIPE
    )
    made = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert len(made) == block.text.count("kubectl create")
    for secret in made:
        check(secret)
        assert all(secret["data"].values())
