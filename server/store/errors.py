"""What can go wrong between a session and its store, each with a stable code."""

from __future__ import annotations

from server.errors import RequestError


class StoreError(RequestError):
    """The store cannot do this. A commit that fails changes nothing.

    ``detail`` is for the operator: it may name files, hosts and users. `str` includes it;
    ``message``, which clients get, does not.
    """

    code = "store_failed"

    def __init__(self, message: str, param: str | None = None, detail: str = "") -> None:
        super().__init__(message, param)
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.message}: {self.detail}" if self.detail else self.message


class StoreFull(StoreError):
    """There is no room for another record; it may come back."""

    code = "store_full"


class StoreFailed(StoreError):
    """The disk or the file system reported an error; the next call begins with a recovery."""

    code = "store_failed"


class StoreLost(StoreError):
    """The store came back without this session: its directory was emptied or replaced."""

    code = "store_lost"


class RecordRefused(StoreError):
    """The database refuses the records of one session; other sessions are not affected."""

    code = "record_refused"

    def __init__(self, reason: Exception) -> None:
        super().__init__(f"the session store does not take this: {brief(reason)}")


class SessionBroken(StoreError):
    """The session is in quarantine: part of its log cannot be read or stored."""

    code = "session_broken"

    def __init__(
        self,
        message: str = "the session cannot continue: part of its log is unusable",
        param: str = "session",
    ) -> None:
        super().__init__(message, param)


class Fenced(StoreError):
    """Another process has taken over the store; this one must neither write nor send."""

    code = "store_taken"


class StoreInUse(StoreError):
    """Another process has the store and is alive."""

    code = "store_in_use"


class OwnedElsewhere(StoreError):
    """Another replica owns the session, the one with the key ``replica``."""

    code = "session_elsewhere"

    def __init__(self, replica: int) -> None:
        super().__init__("another replica has the session and does not answer; try again")
        self.replica = replica


class StoreTooNew(StoreError):
    """A newer version of everstream has written this store."""

    code = "store_too_new"


class SnapshotMismatch(StoreError):
    """The state belongs to other weights, another tokenizer, dtype, backend or layout."""

    code = "snapshot_mismatch"


class SnapshotBroken(StoreError):
    """A state file is not what was written: missing, truncated or altered."""

    code = "snapshot_broken"


class ImportRefused(StoreError):
    """A file that cannot be imported."""

    code = "import_refused"

    def __init__(self, message: str) -> None:
        super().__init__(message, "file")


class HistoryGone(StoreError):
    """The requested part of the log is no longer kept."""

    code = "history_gone"


def brief(error: Exception) -> str:
    """The first line of an error, as plain ASCII and short: it may quote what caused it."""
    return ascii(str(error).strip().partition("\n")[0][:200])[1:-1]
