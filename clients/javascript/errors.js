// What can go wrong, as one tree. Codes and statuses are those of the server's protocol.

/**
 * Base of all errors of this client.
 *
 * `code` is the server's stable code, `param` the field at fault, if one is, and
 * `status` the HTTP status; null where the server said nothing. `retryAfterS` is
 * when to try again, where the server knows it.
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

/** A value that the server refuses (400, 413), or that no JSON can carry. */
export class InvalidRequest extends EverstreamError {}

/** No key or a wrong one (401), one that may not do this, or a foreign origin (403). */
export class AuthenticationError extends EverstreamError {}

/** No such model, named state or route (404, 405). */
export class NotFound extends EverstreamError {}

/** No such session: never there, deleted, expired, or another key's. */
export class SessionNotFound extends NotFound {}

/** The session runs another request (409). */
export class SessionBusy extends EverstreamError {}

/** The session's events have another reader (409), or have one now: it was taken over. */
export class SessionAttached extends EverstreamError {}

/** The first request under the same idempotency key is still under way (409); try again. */
export class KeyInUse extends EverstreamError {}

/** What is asked for lies before the part of the session's log that is kept (410). */
export class HistoryGone extends EverstreamError {}

/** The session belongs to another model, or to another way of running it (409). */
export class SnapshotMismatch extends EverstreamError {}

/** What the store has of the session is damaged (410): it can only be deleted. */
export class SessionBroken extends EverstreamError {}

/** The server is stopping and has saved the session: resume it where it comes back. */
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

/** The server is full or about to stop (429, 503); try again later. */
export class CapacityExhausted extends EverstreamError {}

/** The server cannot keep sessions at present (503); try again later. */
export class StoreFailed extends EverstreamError {}

/** The server has no room for more of kept sessions (507). */
export class StoreFull extends StoreFailed {}

/** The server failed (500), or this request failed in it. */
export class InternalServerError extends EverstreamError {}

/** The request was ended before it was done, as when its session is deleted. */
export class Cancelled extends EverstreamError {}

/** The connection ended before the answer did and could not be taken up again, or be made. */
export class ConnectionLost extends EverstreamError {}

/** Events were left unread for so long that the request was given up. */
export class ReaderTooSlow extends EverstreamError {}

/** What answered is not an Everstream server, or not of this protocol. */
export class ProtocolError extends EverstreamError {}

/** @type {Record<string, typeof EverstreamError>} */
const BY_CODE = {
  session_not_found: SessionNotFound,
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
 * The error for an answer of `status` whose JSON is `body`.
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
    Number.isFinite(seconds) ? seconds : null, // a proxy may name a date
  );
}
