"""``everstream`` whose drafts always pay, whatever this machine needs for a row."""

from __future__ import annotations

from model.state import StateLayout
from server.cli.main import app
from server.engine.drafts import MAX_STREAMS, DraftCosts, Drafter, SuffixDrafter
from server.engine.model_drafter import HeadDrafter, ModelDrafter
from server.engine.runner import CpuStatePool
from server.models import build
from server.models.backend import Backend

#: Rows that cost nothing: what may be right is drafted.
FREE = DraftCosts((1.0, 1.0, 1.0, 1.0, 1.0))
#: Rows that cost more than they may give.
DEAR = DraftCosts((1.0, 2.0, 4.0, 8.0, 16.0))


def _open_drafter(backend: Backend, draft: Backend | None = None, **_: object) -> Drafter:
    """Measures nothing."""
    past = SuffixDrafter(FREE, backend.tokenizer.token_bytes)
    if backend.open_head is not None:  # it drafts alone
        head = backend.open_head()
        past = SuffixDrafter(DEAR, backend.tokenizer.token_bytes)
        return HeadDrafter(past, head, CpuStatePool(head.layout, MAX_STREAMS), FREE)
    if draft is None:
        return past
    pool = CpuStatePool(StateLayout.of(draft.config), MAX_STREAMS)
    return ModelDrafter(past, draft.make_runner(pool), pool, FREE)


if __name__ == "__main__":
    build.open_drafter = _open_drafter
    app()
