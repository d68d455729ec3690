/** @typedef {import("./link.js").Exchange} Exchange */
/**
 * An exchange whose `answer` is the one event of type `kind`.
 *
 * It is sent again where its socket ends, so it must be one that may be done twice.
 * @implements {Exchange}
 */
export class Ask implements Exchange {
    /**
     * @param {string} kind
     * @param {Record<string, unknown>} message
     * @param {number} maxTries
     */
    constructor(kind: string, message: Record<string, unknown>, maxTries: number);
    /** @type {null} */
    bidding: null;
    isUnanswered: boolean;
    kind: string;
    message: Record<string, unknown>;
    /** @type {Promise<any>} */
    answer: Promise<any>;
    opening(): Record<string, unknown>;
    /** @param {any} event */
    receive(event: any): number | "move" | "done" | "more";
    survives(): boolean;
    /** @param {Error} error */
    fail(error: Error): void;
    #private;
}
export type Exchange = import("./link.js").Exchange;
