/** What `receive` of an exchange says: more frames will come, */
export const MORE: "more";
/** none will, */
export const DONE: "done";
/** or the server leaves, and the exchange goes on over another socket. */
export const MOVE: "move";
/** A socket from its handshake to its end. */
export class Link {
    /**
     * @param {WebSocket} socket
     * @param {LinkWatcher} watcher
     * @param {Timers} timers
     * @param {number} timeoutMs silence after which nobody is there
     */
    constructor(socket: WebSocket, watcher: LinkWatcher, timers: Timers, timeoutMs: number);
    watcher: LinkWatcher;
    timers: Timers;
    timeoutMs: number;
    get isOpen(): boolean;
    get isIdle(): boolean;
    /** @returns {Iterable<Exchange>} the exchanges that still run */
    get exchanges(): Iterable<Exchange>;
    /**
     * Sends what begins an exchange or takes it up again.
     * @param {Exchange} exchange
     */
    carry(exchange: Exchange): void;
    /**
     * Sends an exchange's `bidding`, if it runs here.
     * @param {Exchange} exchange
     */
    bid(exchange: Exchange): void;
    /**
     * Leaves an exchange: its frames are no longer wanted.
     * @param {Exchange} exchange
     * @param {"cancel" | "detach"} bidding what becomes of it
     */
    drop(exchange: Exchange, bidding: "cancel" | "detach"): void;
    /** Ends the socket; its owner is not told. */
    close(): void;
    #private;
}
/**
 * A request, for as long as it takes and over as many sockets as it needs.
 *
 * `opening` is the message that begins it, or that takes it up again. `receive` says what
 * comes after an event: one of the above, or the seconds to wait before it is sent again.
 * `survives` is asked when its socket has ended: whether it goes on over another one.
 * `bidding` is what to ask for besides, once it is sent: its end, or that nobody reads it.
 * `isUnanswered`: nothing has come since it was sent.
 */
export type Exchange = {
    opening: () => Record<string, unknown>;
    receive: (event: any) => string | number;
    survives: () => boolean;
    fail: (error: Error) => void;
    bidding: "cancel" | "detach" | null;
    isUnanswered: boolean;
};
/**
 * What a link tells its owner.
 */
export type LinkWatcher = {
    opened: (link: Link) => void;
    heard: () => void;
    /**
     *   the exchange is to be sent again: in so many seconds, or over another socket
     */
    parted: (link: Link, exchange: Exchange, afterS: number | null) => void;
    ended: (link: Link, code: number, reason: string) => void;
};
/**
 * The timers of the platform, or a test's.
 */
export type Timers = {
    setTimeout: (callback: () => void, ms: number) => any;
    clearTimeout: (timer: any) => void;
};
