/**
 * A queue with one end to wait at.
 * @template T
 */
export class Inbox<T> {
    /** How many events wait to be read. */
    get size(): number;
    /**
     * Gives an event to whoever waits for it, or keeps it. One that comes after the end is dropped.
     * @param {T} event
     */
    push(event: T): void;
    /**
     * The next event, or null after the last one. An error that ended it is thrown once.
     * @returns {Promise<T | null>}
     */
    next(): Promise<T | null>;
    /** Forgets what has not been read. */
    discard(): void;
    /** No more events come, */
    end(): void;
    /**
     * because of an error.
     * @param {unknown} error
     */
    fail(error: unknown): void;
    #private;
}
