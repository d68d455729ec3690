"""What of KubeRay's `RayService` (ray.io/v1) our manifest may say: its fields in version 1.6.

Strict, and no larger than what we use: a field that is not here is refused, though KubeRay may
know it. Templates of pods are objects here; they are checked as pods.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def _record(required: str, **fields: Schema) -> Schema:
    return {
        "type": "object",
        "properties": fields,
        "required": required.split(),
        "additionalProperties": False,
    }


_TEMPLATE = _record("spec", metadata={"type": "object"}, spec={"type": "object"})

_HEAD = _record(
    "rayStartParams template",
    rayStartParams=_TEXTS,
    template=_TEMPLATE,
    # Not a load balancer's: the head is for the cluster alone.
    serviceType={"const": "ClusterIP"},
)

_WORKERS = _record(
    "groupName minReplicas maxReplicas rayStartParams template",
    groupName=_TEXT,
    replicas=_COUNT,
    minReplicas=_COUNT,
    maxReplicas=_COUNT,
    rayStartParams=_TEXTS,
    template=_TEMPLATE,
)

_CLUSTER = _record(
    "rayVersion authOptions headGroupSpec workerGroupSpecs",
    rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
    authOptions=_record("mode", mode={"enum": ["disabled", "token"]}, secretName=_TEXT),
    enableInTreeAutoscaling={"type": "boolean"},
    headGroupSpec=_HEAD,
    workerGroupSpecs={"type": "array", "items": _WORKERS, "minItems": 1},
)

RAY_SERVICE: Schema = _record(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=_record("name", name=_TEXT, labels=_TEXTS, annotations=_TEXTS),
    spec=_record(
        "serveConfigV2 rayClusterConfig",
        serveConfigV2=_TEXT,
        rayClusterConfig=_CLUSTER,
        excludeHeadPodFromServeSvc={"type": "boolean"},
        upgradeStrategy=_record(
            "type", type={"enum": ["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]}
        ),
        rayClusterDeletionDelaySeconds=_COUNT,
    ),
)
