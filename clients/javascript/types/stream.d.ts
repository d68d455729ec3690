/**
 * @typedef {import("./link.js").Exchange} Exchange
 * @typedef {import("./events.js").Started} Started
 * @typedef {import("./events.js").Resumed} Resumed
 * @typedef {import("./events.js").Reset} Reset
 */
/**
 * How a stream begins. `isKept`: its session outlives the socket. `follows`: it wants the
 * events of several generations, where they are there.
 * @typedef {object} Beginning
 * @property {Record<string, unknown>} message
 * @property {boolean} isKept
 * @property {boolean} follows
 */
/** @implements {Exchange} */
export class Stream implements Exchange {
    /**
     * @param {import("./connection.js").Connection} connection
     * @param {Beginning} beginning
     * @param {{maxTries: number, maxUnread: number}} limits
     */
    constructor(connection: import("./connection.js").Connection, beginning: Beginning, limits: {
        maxTries: number;
        maxUnread: number;
    });
    /** @type {Inbox<import("./events.js").GenerationEvent>} */
    inbox: Inbox<import("./events.js").GenerationEvent>;
    /** @type {Started | Resumed | Reset | null} the first event */
    first: Started | Resumed | Reset | null;
    /** @type {import("./events.js").Finished | null} the last one that has arrived */
    finished: import("./events.js").Finished | null;
    /** @type {"cancel" | "detach" | null} */
    bidding: "cancel" | "detach" | null;
    isUnanswered: boolean;
    isEnded: boolean;
    connection: import("./connection.js").Connection;
    beginning: Beginning;
    maxUnread: number;
    /** @type {Promise<Started | Resumed | Reset>} */
    begun: Promise<Started | Resumed | Reset>;
    /** @type {Promise<void>} */
    over: Promise<void>;
    /**
     * The next event, or null after the last one.
     * @returns {Promise<import("./events.js").GenerationEvent | null>}
     */
    next(): Promise<import("./events.js").GenerationEvent | null>;
    /**
     * Asks the server for its end, or to let it go on unread. `over` tells when that is so.
     * @param {"cancel" | "detach"} bidding
     */
    bid(bidding: "cancel" | "detach"): void;
    opening(): Record<string, unknown>;
    /**
     * @param {any} event
     * @returns {string | number}
     */
    receive(event: any): string | number;
    survives(): boolean;
    /** @param {Error} error */
    fail(error: Error): void;
    #private;
}
export type Exchange = import("./link.js").Exchange;
export type Started = import("./events.js").Started;
export type Resumed = import("./events.js").Resumed;
export type Reset = import("./events.js").Reset;
/**
 * How a stream begins. `isKept`: its session outlives the socket. `follows`: it wants the
 * events of several generations, where they are there.
 */
export type Beginning = {
    message: Record<string, unknown>;
    isKept: boolean;
    follows: boolean;
};
import { Inbox } from "./inbox.js";
