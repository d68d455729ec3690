"""sizing.md: its figures follow from the shapes of the models and from committed results."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.checkpoints.shapes import CONFIGS
from model.architectures import config_from_dict
from model.architectures.config import Config
from model.bundled_models import bundled_models
from model.checkpoint_files import CONFIG
from model.files import read_json
from model.state import StateLayout
from model.weights import num_parameters
from server.cli.inspect import SERVED_BYTES
from server.config import SHARED_SAVE_INTERVAL
from server.store.sqlite.database import DATABASE_FILE
from server.store.sqlite.store import open_store
from server.store.table_store import StoreLimits
from tests.docs.pages import DOCS, flowed, page, rows, section
from tests.server.store.records import IDENTITY, Writer

TEXT = page("sizing.md")
RESULTS = DOCS.parent / "benchmarks" / "results"


def models() -> dict[str, Config]:
    bundled = {
        f"`{name}`": config_from_dict(read_json(folder / CONFIG))
        for name, folder in bundled_models().items()
    }
    return bundled | {f"RWKV-7 {size}": config for size, config in CONFIGS.items()}


def row(name: str, config: Config) -> list[str]:
    state, parameters = StateLayout.of(config).num_bytes, num_parameters(config)
    return [
        name,
        f"{parameters / 1e6:,.0f} M",
        f"{2 * parameters / 1e6:,.0f} MB",
        f"{parameters / 1e6:,.0f} MB",
        f"{state / 1e6:.2f} MB",
        f"{(512 << 20) // state:,}",
        f"{(1 << 30) // state:,}",
        f"{StoreLimits.max_snapshots * state / 1e6:.0f} MB",
        f"{state / SHARED_SAVE_INTERVAL / 1e3:.1f} kB",
    ]


def test_table_follows_from_the_shapes() -> None:
    shown = rows(section(TEXT, "By model"))
    assert shown == [row(name, config) for name, config in models().items()]


def test_log_of_a_million_tokens_has_the_size_that_the_page_says(tmp_path: Path) -> None:
    """English words of one token each, as a small part of it shows."""
    number = 20_000
    store, writer = open_store(tmp_path, IDENTITY, "relaxed"), Writer()
    store.commit([writer.opened(), writer.accepted()])
    for turn in range(number // 1000):
        store.commit([writer.token(" tale") for _ in range(1000)])
        store.maintain(float(turn))
    store.commit([writer.finished(), writer.saved(evicted=True)])
    store.compact()
    store.close()
    megabytes = (tmp_path / DATABASE_FILE).stat().st_size / number
    assert 40 < megabytes < 50
    assert "about 45 MB for each million tokens" in flowed(TEXT)


def test_memory_beyond_the_weights_is_that_of_the_results() -> None:
    sizes = json.loads((RESULTS / "checkpoint_sizes.json").read_text())["sizes"]
    beyond = [
        loaded["steady_bytes"] / 1e6 - SERVED_BYTES[loaded["dtype"]] * size["parameters"] / 1e6
        for size in sizes
        for loaded in size["loading"]
    ]
    assert f"{min(beyond):.0f} to {max(beyond):.0f} MB" == "178 to 432 MB"
    assert "180 to 430 MB" in TEXT


def test_figures_are_those_of_the_results() -> None:
    capacity = json.loads((RESULTS / "capacity.json").read_text())["sessions"]
    paper = json.loads((RESULTS / "cluster.json").read_text())["paper"]["inputs"]
    for figure in (
        f"{capacity['idle_bytes_per_session']:,}",
        f"{capacity['state_bytes']:,}",
        f"{capacity['extra_bytes_per_active_session']:,}",
        f"{paper['wal_bytes_per_token']:,.0f}",
        f"{paper['database_us_per_token']:.0f} µs",
        f"{paper['streams']} streams",
    ):
        assert figure in TEXT, figure
