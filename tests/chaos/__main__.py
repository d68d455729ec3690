"""``python -m tests.chaos --seed N --minutes M --report FILE``: exit code 1 on a broken promise."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from pathlib import Path

# Tiny models gain nothing from a second thread. Child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.chaos.faults import KINDS
from tests.chaos.report import as_markdown, write_report
from tests.chaos.run import Plan, chaos
from tests.chosen_model import chosen_model


def main() -> int:
    options = _options()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    kinds = [kind for kind in KINDS if not options.only or kind in options.only]
    plan = Plan(
        seed,
        options.minutes * 60,
        num_clients=options.clients,
        kinds=kinds,
        max_faults=options.faults,
        wires="proxies" if options.proxies else None,
        attention=options.attention,
        model=chosen_model(),
        longest=options.longest,
        drafts=options.drafts,
    )
    verdict = asyncio.run(chaos(plan, lambda line: print(line, flush=True)))
    print(as_markdown(verdict))
    if options.report is not None:
        write_report(verdict, options.report)
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
        for name, log in verdict.logs.items():
            (options.logs / f"{name}.log").write_text(log)
    print(f"seed {seed}: {'every promise was kept' if verdict.is_good else 'PROMISES BROKEN'}")
    return 0 if verdict.is_good else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="drawn, and printed, if left out")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--report", type=Path, help="a file ending in .json, or one of Markdown")
    parser.add_argument("--logs", type=Path, help="a folder for what the replicas logged")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument(
        "--attention",
        default="gated",
        help="of the model, or a family: see tests/tiny.py; EVERSTREAM_TEST_MODEL has another",
    )
    parser.add_argument(
        "--longest", type=int, default=600, help="tokens that an answer has at most"
    )
    parser.add_argument("--drafts", action="store_true", help="replicas that draft what they can")
    parser.add_argument("--faults", type=int, help="at most so many")
    parser.add_argument(
        "--only", action="append", choices=sorted(set(KINDS)), help="a kind of fault; repeat"
    )
    parser.add_argument(
        "--proxies", action="store_true", help="cut by proxies also where namespaces can be had"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
