/**
 * @typedef {import("./link.js").Exchange} Exchange
 * @typedef {import("./link.js").Timers} Timers
 */
/**
 * What a connection is made of.
 * @typedef {object} ConnectionParts
 * @property {string} url of the stream
 * @property {() => string | null} key
 * @property {typeof WebSocket} WebSocket
 * @property {Timers} timers
 * @property {() => number} random from 0 to 1
 * @property {number} timeoutS
 * @property {number} maxTries
 * @property {(status: import("./events.js").Status) => void} onStatus
 */
/** Exchanges over one socket at a time, which is made when it is wanted and made again. */
export class Connection {
    /** @param {ConnectionParts} parts */
    constructor(parts: ConnectionParts);
    parts: ConnectionParts;
    /** Connects now, also when a later try is planned, and stays connected. */
    connect(): void;
    /**
     * Sends an exchange as soon as there is a socket.
     * @param {Exchange} exchange
     */
    start(exchange: Exchange): void;
    /**
     * Sends an exchange's `bidding` where it runs; where it waits, that is sent with it.
     * @param {Exchange} exchange
     */
    bid(exchange: Exchange): void;
    /**
     * Leaves an exchange.
     * @param {Exchange} exchange
     * @param {"cancel" | "detach"} bidding what becomes of it
     */
    drop(exchange: Exchange, bidding: "cancel" | "detach"): void;
    /**
     * Whether an exchange waits to be sent.
     * @param {Exchange} exchange
     */
    isWaiting(exchange: Exchange): boolean;
    /** Ends everything. */
    close(): void;
    #private;
}
export type Exchange = import("./link.js").Exchange;
export type Timers = import("./link.js").Timers;
/**
 * What a connection is made of.
 */
export type ConnectionParts = {
    /**
     * of the stream
     */
    url: string;
    key: () => string | null;
    WebSocket: typeof WebSocket;
    timers: Timers;
    /**
     * from 0 to 1
     */
    random: () => number;
    timeoutS: number;
    maxTries: number;
    onStatus: (status: import("./events.js").Status) => void;
};
