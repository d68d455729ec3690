"""Why a format is refused."""

from __future__ import annotations


class FormatRefused(ValueError):
    """A format that is wrong, not supported, or too much work. The message is for the client."""


class NotTried(FormatRefused):
    """No fault of the format that is known of: another time it may be taken."""


class RefusedAt(FormatRefused):
    """A refusal that says at which place of a schema."""
