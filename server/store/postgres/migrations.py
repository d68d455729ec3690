"""The tables of a shared store, and how a store of an older format gets them.

Each version of a model has a schema of its own in the database, so that the tables
are those of the embedded store, with these columns and tables next to them:

- `replica` has a row for each process that serves. Its key is a number that no other
  process ever gets, and so the fence of all that the process holds. ``link`` counts
  its connections: what an older one still sends is refused.
- ``session.holder`` is the only replica that may append to a session. NULL: the session has
  no owner, and any replica may acquire it.
- ``append_journal`` compares both in the transaction that appends.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from server.store.database import SECOND, TABLES, refuse_unknown
from server.store.postgres.connecting import connect
from server.store.postgres.database import failure

if TYPE_CHECKING:
    from server.store.postgres.database import PostgresDatabase

_TYPES = {
    "integer": "bigint",
    "text": "text",
    "real": "double precision",
    "blob": "bytea",
    "row_key": "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "session_key": "bigint PRIMARY KEY",
    "end": "",
    "end_by_key": "",
}

_REPLICAS = """
    CREATE TABLE meta (name text PRIMARY KEY, value text NOT NULL);

    CREATE TABLE replica (
        key bigint PRIMARY KEY,
        link bigint NOT NULL DEFAULT 0,
        beat bigint NOT NULL DEFAULT 0,
        address text NOT NULL
    );
    CREATE SEQUENCE replica_key MAXVALUE 2147483647;

    -- One row for each commit of a replica; `keys` are those of its sessions.
    CREATE TABLE journal (
        replica bigint NOT NULL,
        id bigint NOT NULL,
        data bytea NOT NULL,
        keys text NOT NULL,
        PRIMARY KEY (replica, id)
    );

    ALTER TABLE session ADD COLUMN holder bigint, SET (fillfactor = 80);
    CREATE INDEX session_holder ON session (holder) WHERE holder IS NOT NULL;

    -- Keys under which a replica is about to begin something.
    CREATE TABLE key_claim (
        owner text NOT NULL,
        key text NOT NULL,
        replica bigint NOT NULL REFERENCES replica ON DELETE CASCADE,
        PRIMARY KEY (owner, key)
    );
    CREATE INDEX key_claim_replica ON key_claim (replica);

    -- Whether a replica may write through its connection number `my_link`, until the transaction
    -- ends: another process that ends the replica, or connects anew for it, waits for that.
    CREATE FUNCTION hold(me bigint, my_link bigint) RETURNS boolean
    LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock_shared(hashtext(current_schema()), me::int);
        RETURN EXISTS (SELECT FROM replica WHERE key = me AND link = my_link);
    END $$;

    -- `hold`, where nothing waits for its answer.
    CREATE FUNCTION must_hold(me bigint, my_link bigint) RETURNS void
    LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
    BEGIN
        IF NOT hold(me, my_link) THEN
            RAISE EXCEPTION 'the replica is no more' USING ERRCODE = 'EV001';
        END IF;
    END $$;

    -- 0: done. 1: the replica is no more. 2: it does not hold all of the sessions `held`.
    -- 3: the row before is not there: this is not the database that it was.
    CREATE FUNCTION append_journal(
        me bigint, my_link bigint, row_id bigint, row_data bytea, row_keys text, held bigint[],
        synced boolean
    ) RETURNS int LANGUAGE plpgsql SET search_path FROM CURRENT SET lock_timeout = '2s' AS $$
    BEGIN
        IF NOT hold(me, my_link) THEN
            RETURN 1;
        END IF;
        IF cardinality(held) > (
            SELECT count(*) FROM session WHERE key = ANY(held) AND holder = me
        ) THEN
            RETURN 2;
        END IF;
        IF row_id > 1 AND NOT EXISTS (
            SELECT FROM journal WHERE replica = me AND id = row_id - 1
        ) THEN
            RETURN 3;
        END IF;
        IF NOT synced THEN
            PERFORM set_config('synchronous_commit', 'off', true);
        END IF;
        INSERT INTO journal VALUES (me, row_id, row_data, row_keys);
        RETURN 0;
    END $$;
"""

_STATES = """
    -- States, where no object storage has them. They are random to any compression. The space
    -- of deleted ones is used again soon: a state is hundreds of rows of the second table.
    CREATE TABLE object (name text PRIMARY KEY, data bytea NOT NULL) WITH (
        autovacuum_vacuum_scale_factor = 0.05,
        toast.autovacuum_vacuum_scale_factor = 0.05,
        toast.autovacuum_vacuum_threshold = 1000,
        toast.autovacuum_vacuum_cost_delay = 0
    );
    ALTER TABLE object ALTER COLUMN data SET STORAGE EXTERNAL;

    -- States that may have no row that names them, to be looked at when they are due.
    CREATE TABLE garbage (name text PRIMARY KEY, due_s double precision NOT NULL);
    CREATE INDEX garbage_due ON garbage (due_s);

    -- A state in the table can go as soon as its last row has gone: both are of one database, so
    -- that neither a crash nor a dump finds a row without its state. A row that is just being
    -- made for it is kept from that by `keep_state`. One in an object storage waits for an hour:
    -- that of before a crash, or a dump, may still be asked for.
    CREATE FUNCTION note_garbage() RETURNS trigger
    LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
    BEGIN
        INSERT INTO garbage VALUES (
            OLD.file, extract(epoch FROM now())
                + CASE WHEN starts_with(OLD.file, 'table-') THEN 0 ELSE 3600 END
        ) ON CONFLICT (name) DO UPDATE SET due_s = excluded.due_s;
        RETURN NULL;
    END $$;
    CREATE TRIGGER snapshot_gone AFTER DELETE ON snapshot
        FOR EACH ROW WHEN (OLD.file IS NOT NULL) EXECUTE FUNCTION note_garbage();

    -- The note is what a sweep locks. One that goes on is waited for here; its state is gone then,
    -- and the transaction is done once more, with a state of its own.
    CREATE FUNCTION keep_state() RETURNS trigger
    LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
    BEGIN
        INSERT INTO garbage VALUES (NEW.file, extract(epoch FROM now()) + 3600)
            ON CONFLICT (name) DO UPDATE SET due_s = excluded.due_s;
        IF NOT EXISTS (SELECT FROM object WHERE name = NEW.file) THEN
            RAISE EXCEPTION 'the state of a snapshot is gone' USING ERRCODE = '40001';
        END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER snapshot_state BEFORE INSERT ON snapshot
        FOR EACH ROW WHEN (starts_with(NEW.file, 'table-')) EXECUTE FUNCTION keep_state();

    -- States of the beginnings of prompts, shared by the replicas.
    CREATE TABLE prefix (
        space text NOT NULL,
        owner text NOT NULL,
        key text NOT NULL,
        num_tokens bigint NOT NULL,
        name text NOT NULL,
        bytes bigint NOT NULL,
        used_s double precision NOT NULL,
        PRIMARY KEY (space, owner, key)
    );
    CREATE INDEX prefix_used ON prefix (used_s);

    -- States that sessions begin with, by the operator's names. `data` is a file with a checksum.
    CREATE TABLE named_state (name text PRIMARY KEY, digest text NOT NULL, data bytea NOT NULL);
    ALTER TABLE named_state ALTER COLUMN data SET STORAGE EXTERNAL;
"""

#: ``MIGRATIONS[i]`` leads from format i to format i + 1. Those of a release never change.
MIGRATIONS: tuple[str, ...] = (TABLES.format(**_TYPES) + _REPLICAS + _STATES, SECOND)


def migrate(database: PostgresDatabase) -> None:
    """Brings the schema to this version, all of it or nothing, one replica at a time.

    Raises `StoreTooNew` where a newer version of everstream has written it.
    """
    with database.whole():
        if _version(database) == len(MIGRATIONS):
            return
    with database.whole(pipelined=False):
        database.run("SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0")
        database.execute("SELECT pg_advisory_xact_lock(hashtextextended(?, 0))", (database.schema,))
        database.make_schema()
        version = _version(database)
        refuse_unknown(version, len(MIGRATIONS), "the shared store", "database")
        for step in MIGRATIONS[version:]:
            database.run(step)
        database.set_meta("version", len(MIGRATIONS))


def _version(database: PostgresDatabase) -> int:
    return int(database.meta("version") or 0) if database.has_tables() else 0


SCHEMA = "everstream_"

_OTHERS = "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, %s) AND nspname <> %s"


def schema_of(name: str, digest: str) -> str:
    """The schema of a version of a model; PostgreSQL takes no more than 63 characters."""
    if len(name) > 24:
        name = f"{name[:15]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"{SCHEMA}{name}_{digest[:16]}"


def owner_elsewhere(url: str, own: str, session: str) -> str | None:
    """Whose a session in another schema than ``own`` is. Raises `StoreError`."""
    try:
        with connect(url) as connection:
            for (schema,) in connection.execute(_OTHERS, (SCHEMA, own)).fetchall():
                table = sql.Identifier(schema, "session")
                find = sql.SQL("SELECT owner FROM {} WHERE id = %s").format(table)
                for (owner,) in connection.execute(find, (session,)):
                    return str(owner)
            return None
    except psycopg.Error as error:
        raise failure(error) from error
