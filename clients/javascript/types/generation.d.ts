/**
 * The events of a generation, once over.
 *
 * Iterating gives a `token` for each token and ends with a `finished`, so that their texts
 * joined are the answer. A `reset` comes where events after those that were read cannot be had
 * any more. Leaving a `for await` loop early cancels what still runs; `detach` it first where
 * it shall go on.
 *
 * @implements {AsyncIterableIterator<GenerationEvent>}
 */
export class Generation implements AsyncIterableIterator<GenerationEvent> {
    /**
     * @param {Stream} stream
     * @param {AbortSignal} [signal]
     */
    constructor(stream: Stream, signal?: AbortSignal);
    /** Where it began, or was taken up: null until that has arrived; see `begun`. */
    get first(): import("./events.js").Reset | import("./events.js").Started | import("./events.js").Resumed | null;
    /** The `finished` event, once it has arrived. */
    get finished(): import("./events.js").Finished | null;
    /** The session's id, or null until it is known. */
    get session(): string | null;
    /**
     * The place after the last event that was read, for `Client.resume`; null before the beginning.
     * @returns {import("./events.js").Cursor | null}
     */
    get cursor(): import("./events.js").Cursor | null;
    /**
     * The event that it begins with: `started`, or `resumed` or `reset` where it is read again.
     * @returns {Promise<import("./events.js").Started | import("./events.js").Resumed | import("./events.js").Reset>}
     */
    begun(): Promise<import("./events.js").Started | import("./events.js").Resumed | import("./events.js").Reset>;
    /** All of the text that has not been read, when it is there. Throws `SessionReset` at a gap. */
    text(): Promise<string>;
    /**
     * Ends it and gives its `finished`, or null where it ended without one. Whoever iterates
     * over it still gets what came before.
     */
    cancel(): Promise<import("./events.js").Finished | null>;
    /**
     * Leaves it to go on by itself, if its session is kept, and ends the iteration. What has not
     * been read is still there for `Client.resume`, from `cursor` on.
     */
    detach(): Promise<void>;
    /** @returns {Promise<IteratorResult<GenerationEvent, undefined>>} */
    next(): Promise<IteratorResult<GenerationEvent, undefined>>;
    /**
     * What leaving a loop calls: cancels what still runs, and waits until it has ended.
     * @returns {Promise<IteratorResult<GenerationEvent, undefined>>}
     */
    return(): Promise<IteratorResult<GenerationEvent, undefined>>;
    [Symbol.asyncIterator](): this;
    #private;
}
export type GenerationEvent = import("./events.js").GenerationEvent;
export type Stream = import("./stream.js").Stream;
