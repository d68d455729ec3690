// The error tree of the client. Codes and statuses are those of the server's protocol.

/**
 * The base of all errors of this client.
 *
 * `code` is the server's stable code, `param` the field at fault, and `status` the
 * HTTP status; each is null if the server did not send it. `retryAfterS` is the
 * number of seconds to wait before a retry, if the server sent it.
 */
export class EverstreamError extends Error {
  /**
   * @param {string} message
   * @param {string | null} [code]
   * @param {string | null} [param]
   * @param {number | null} [status]
   * @param {number | null} [retryAfterS]
   */
  constructor(message, code = null, param = null, status = null, retryAfterS = null) {
    super(message);
    this.name = new.target.name;
    this.code = code;
    this.param = param;
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

/** The server refuses a value (400, 413), or JSON cannot represent it. */
export class InvalidRequest extends EverstreamError {}

/** The key is missing or wrong (401), or the key, origin or host is not allowed (403). */
export class AuthenticationError extends EverstreamError {}

/** The model, named state or route does not exist (404, 405). */
export class NotFound extends EverstreamError {}

/** The session does not exist, was deleted, has expired or belongs to another key (404). */
export class SessionNotFound extends NotFound {}

/** The server does not have this prefix, or has it no more (404). Send the whole prompt. */
export class PrefixNotFound extends NotFound {}

/** The session runs another request (409). Also other conflicts without a class here. */
export class SessionBusy extends EverstreamError {}

/** Another client reads the session (409), or has taken it over from this one. */
export class SessionAttached extends EverstreamError {}

/** The first request with the same idempotency key still runs (409). Retry later. */
export class KeyInUse extends EverstreamError {}

/** The requested position is before the beginning of the session's log (410). */
export class HistoryGone extends EverstreamError {}

/** The session belongs to another model, tokenizer, backend, dtype or state dtype (409). */
export class SnapshotMismatch extends EverstreamError {}

/** The session's data in the store is damaged (410). It can only be deleted. */
export class SessionBroken extends EverstreamError {}

/** The server has saved the session and released it (503). Resume it later. */
export class SessionMigrated extends EverstreamError {}

/** The events after the last known one are not available; the message says why. */
export class SessionReset extends EverstreamError {
  /** @param {import("./events.js").Reset} event */
  constructor(event) {
    super(event.reason, "reset");
    this.session = event.session;
    this.epoch = event.epoch;
    this.last_seq = event.last_seq;
  }
}

/** The server is full, limits the key, or is stopping (429, 503). Retry later. */
export class CapacityExhausted extends EverstreamError {}

/** The server's store is unavailable (503). Retry later. */
export class StoreFailed extends EverstreamError {}

/** The server's store has no space left (507). */
export class StoreFull extends StoreFailed {}

/** The server failed (500), or the request failed while it ran. */
export class InternalServerError extends EverstreamError {}

/** The request was cancelled before it was done, for example by a delete of its session. */
export class Cancelled extends EverstreamError {}

/** The connection failed, or ended before the answer did and the request was not recovered. */
export class ConnectionLost extends EverstreamError {}

/** The request was ended because too many of its events were unread. */
export class ReaderTooSlow extends EverstreamError {}

/** The answer does not follow the protocol; it may come from another kind of server. */
export class ProtocolError extends EverstreamError {}

/** @type {Record<string, typeof EverstreamError>} */
const BY_CODE = {
  session_not_found: SessionNotFound,
  prefix_not_found: PrefixNotFound,
  session_attached: SessionAttached,
  key_in_use: KeyInUse,
  history_gone: HistoryGone,
  snapshot_mismatch: SnapshotMismatch,
  session_broken: SessionBroken,
  snapshot_broken: SessionBroken,
  migrated: SessionMigrated,
  store_failed: StoreFailed,
  store_lost: StoreFailed,
  store_taken: StoreFailed,
  store_full: StoreFull,
  reader_too_slow: ReaderTooSlow,
};

/** @type {Record<number, typeof EverstreamError>} */
const BY_STATUS = {
  401: AuthenticationError,
  403: AuthenticationError,
  404: NotFound,
  405: NotFound,
  409: SessionBusy,
  429: CapacityExhausted,
  503: CapacityExhausted,
};

/**
 * Returns the error for an answer with `status` and the JSON value `body`. The code
 * determines the class, else the status.
 *
 * @param {number} status
 * @param {any} body
 * @param {string | null} [retryAfter] the header of that name
 * @returns {EverstreamError}
 */
export function errorOf(status, body, retryAfter = null) {
  const details = body?.error ?? { message: `the server answered ${status}` };
  const otherwise = status >= 400 && status < 500 ? InvalidRequest : InternalServerError;
  const kind = BY_CODE[details.code] ?? BY_STATUS[status] ?? otherwise;
  const seconds = details.retry_after_s ?? (retryAfter === null ? NaN : Number(retryAfter));
  return new kind(
    String(details.message),
    details.code ?? null,
    details.param ?? null,
    status,
    Number.isFinite(seconds) ? seconds : null, // the header of a proxy may be a date
  );
}
