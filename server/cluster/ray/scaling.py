"""How many replicas there should be: as many as the streams that run or wait need.

Serve would count open requests. A socket is one for as long as it is open, whatever
runs on it, and one `append` of a long text is one too: the engines' own counts say
more. Serve adds the bounds, the delays, and the average over the last seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingContext

#: What a replica reports: `Replica.record_autoscaling_stats`.
STREAMS = "streams"

# Ray 2.60 calls the field deprecated, and does not yet read the variable that is to replace it.
METRICS_INTERVAL_S = 1.0
LOOK_BACK_S = 5.0
UPSCALE_DELAY_S = 2.0


class StreamsPolicy:
    """``target_streams`` for each replica, those that wait included."""

    def __init__(self, target_streams: int) -> None:
        self._target = target_streams

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The wanted number, and nothing to remember."""
        reported: Mapping[Any, float] = (context.aggregated_metrics or {}).get(STREAMS, {})
        if not reported:  # no replica has reported yet
            return context.target_num_replicas, {}
        return max(1, math.ceil(sum(reported.values()) / self._target)), {}
