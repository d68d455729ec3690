"""What the soak sees of its server at one moment, and when a soak has passed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.machine import num_descriptors, resident_bytes
from benchmarks.process import ServerProcess
from benchmarks.soak.wire import Tally, open_raw

MIB = 1 << 20
MAX_GROWTH_BYTES = 16 * MIB
MAX_GROWTH_SHARE = 0.05
LOG_CHARS = 6000


@dataclass(frozen=True)
class Observation:
    """The server at one moment, by its own metrics and by the kernel's view of its process."""

    held_slots: int
    num_sessions: int
    num_running: int
    num_waiting: int
    num_websockets: int
    num_descriptors: int
    resident_bytes: int

    def leftovers(self, before: Observation) -> list[str]:
        """What is not as free as it was before; empty when the server is idle."""
        counts = {
            "slots are held": self.held_slots,
            "sessions exist": self.num_sessions,
            "requests run": self.num_running,
            "requests wait": self.num_waiting,
            "WebSockets are open": self.num_websockets,
            "file descriptors more than before": self.num_descriptors - before.num_descriptors,
        }
        return [f"{count} {what}" for what, count in counts.items() if count > 0]


async def observe(server: ServerProcess) -> Observation:
    """Reads `/metrics` over a connection that the server has closed again, then the kernel."""
    ask = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    async with open_raw(server.url, ask) as reader:
        answer = (await reader.read()).decode()
    values = {
        (sample.name, *(value for name, value in sample.labels.items() if name != "model")): int(
            sample.value
        )
        for family in text_string_to_metric_families(answer.partition("\r\n\r\n")[2])
        for sample in family.samples
        if family.type == "gauge"
    }
    return Observation(
        held_slots=values["everstream_slots", "held"],
        num_sessions=values["everstream_sessions",],
        num_running=values["everstream_running_requests",],
        num_waiting=values["everstream_queue_requests",],
        num_websockets=values["everstream_websockets",],
        num_descriptors=num_descriptors(server.pid),
        resident_bytes=resident_bytes(server.pid),
    )


@dataclass(frozen=True)
class Ending:
    """How the process ended."""

    exit_code: int
    log: str


def verdict(
    before: Observation, warm: Observation, after: Observation, tally: Tally, ending: Ending
) -> list[str]:
    """Every criterion that failed, empty for a pass.

    The server was seen ``before`` any load, ``warm`` after the warm-up, and ``after`` it all.
    """
    failures = [*after.leftovers(before), *tally.problems]
    growth = after.resident_bytes - warm.resident_bytes
    if growth >= max(MAX_GROWTH_BYTES, MAX_GROWTH_SHARE * warm.resident_bytes):
        failures.append(f"resident memory grew by {growth / MIB:.1f} MiB")
    failures += [
        f"{count} answers had status {status}"
        for status, count in sorted(tally.statuses.items())
        if status >= 500 and status != 503
    ]
    if ending.exit_code != 0:
        failures.append(f"the server ended with exit code {ending.exit_code}")
    if found := re.search(r"Traceback| ERROR ", ending.log):
        start = ending.log.rfind("\n", 0, found.start()) + 1
        failures.append(f"in the server's log:\n{ending.log[start : start + LOG_CHARS]}")
    return failures
