"""``python -m model.convert.linearize``: the steps of a conversion, in one folder."""

from __future__ import annotations

from model.convert.linearize.commands import app

app()
