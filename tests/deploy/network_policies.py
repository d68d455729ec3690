"""Which pod reaches which under network policies: as much of their rules as our manifests use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple

Policy = dict[str, Any]
Labels = Mapping[str, str]


class Pod(NamedTuple):
    """``ports`` are its named ones; ``namespace`` None is the one that the policies are in.

    With an ``address`` it is a host outside of the cluster.
    """

    labels: Labels
    ports: Mapping[str, int] = {}
    namespace: Labels | None = None
    address: str | None = None


def reaches(policies: Iterable[Policy], source: Pod, target: Pod, port: int) -> bool:
    """Whether a TCP connection comes about: both sides' policies let it."""
    policies = list(policies)
    ways = (("egress", "to", source, target), ("ingress", "from", target, source))
    return all(
        _lets(policies, way, side, subject, peer, target, port) for way, side, subject, peer in ways
    )


def _lets(
    policies: list[Policy], way: str, side: str, subject: Pod, peer: Pod, target: Pod, port: int
) -> bool:
    """A pod that no policy is about is free; of one that some are about, one rule must fit."""
    if subject.namespace is not None or subject.address is not None:
        return True
    about = [
        policy["spec"]
        for policy in policies
        if way.capitalize() in policy["spec"]["policyTypes"]
        and _selects(policy["spec"]["podSelector"], subject.labels)
    ]
    rules = [rule for spec in about for rule in spec.get(way, ())]
    return not about or any(
        any(_is_peer(one, peer) for one in rule[side]) and _has_port(rule, target, port)
        for rule in rules
    )


def _is_peer(peer: Policy, pod: Pod) -> bool:
    unknown = set(peer) - {"namespaceSelector", "podSelector", "ipBlock"}
    assert not unknown, unknown
    if "ipBlock" in peer or pod.address is not None:
        return "ipBlock" in peer and _holds(peer["ipBlock"], pod.address)
    if "namespaceSelector" not in peer:
        is_there = pod.namespace is None
    else:
        is_there = _selects(peer["namespaceSelector"], pod.namespace or {})
    return is_there and _selects(peer.get("podSelector", {}), pod.labels)


def _holds(block: Policy, address: str | None) -> bool:
    """A pod without an address is none that rules by addresses are for."""
    if address is None:
        return False
    host = ip_address(address)
    return host in ip_network(block["cidr"]) and not any(
        host in ip_network(one) for one in block.get("except", ())
    )


def _has_port(rule: Policy, target: Pod, port: int) -> bool:
    if "ports" not in rule:
        return True
    allowed = {one["port"] for one in rule["ports"] if one["protocol"] == "TCP"}
    return port in {target.ports.get(one, one) for one in allowed}


def _selects(selector: Policy, labels: Labels) -> bool:
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In", expression
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
