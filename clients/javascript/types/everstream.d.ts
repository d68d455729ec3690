export * from "./errors.js";
/** A server, with any number of generations side by side over one socket. */
export class Client {
    /**
     * @param {string | URL} url the server's address, such as `http://127.0.0.1:8000`
     * @param {ClientOptions} [options]
     */
    constructor(url: string | URL, options?: ClientOptions);
    /** The key of the next connection and of the next request over HTTP. */
    apiKey: string | null;
    /**
     * Connects now, also when a later try is planned, and stays connected until `close`. Without
     * it there is a connection when something wants one. `onStatus` tells how it goes.
     */
    connect(): void;
    /** Ends the connection. What runs in kept sessions goes on for a while: see `resume`. */
    close(): void;
    /**
     * A generation in a new session, or in `options.session`. It starts at once.
     * @param {string | number[]} [prompt] text or token ids
     * @param {GenerateOptions} [options]
     * @returns {Generation}
     */
    complete(prompt?: string | number[], options?: GenerateOptions): Generation;
    /**
     * The events of a session after a cursor: those that were missed, then those to come, of one
     * generation or of several, to the end of what runs. A `reset` comes first where the events
     * are gone or the epoch is over.
     *
     * @param {string} session its id
     * @param {{last_seq: number, epoch?: string, take_over?: boolean, signal?: AbortSignal}} cursor
     *   `last_seq` 0 for all; `take_over` takes it from its present reader
     * @returns {Generation}
     */
    resume(session: string, { last_seq, epoch, take_over, signal }: {
        last_seq: number;
        epoch?: string;
        take_over?: boolean;
        signal?: AbortSignal;
    }): Generation;
    /**
     * A kept session, of `model` where several are served: empty, or with the named state `state`.
     * @param {{model?: string, state?: string}} [options]
     */
    createSession({ model, state }?: {
        model?: string;
        state?: string;
    }): Promise<Session>;
    /**
     * A session by its id; nothing is asked of the server yet.
     * @param {string} id
     */
    session(id: string): Session;
    /**
     * A new session from what `Session.export` gave, here or on another server.
     * @param {BufferSource | Blob} file
     */
    importSession(file: BufferSource | Blob): Promise<Session>;
    /**
     * All of the caller's kept sessions by id, those that sleep too.
     * @param {number} [pageSize]
     * @returns {AsyncGenerator<ListedSession, void, undefined>}
     */
    sessions(pageSize?: number): AsyncGenerator<ListedSession, void, undefined>;
    /**
     * The models that are served.
     * @returns {Promise<Model[]>}
     */
    models(): Promise<Model[]>;
    /** Whether the server is alive. */
    health(): Promise<boolean>;
    #private;
}
export type Started = import("./events.js").Started;
export type Token = import("./events.js").Token;
export type Finished = import("./events.js").Finished;
export type Resumed = import("./events.js").Resumed;
export type Reset = import("./events.js").Reset;
export type Appended = import("./events.js").Appended;
export type Rewound = import("./events.js").Rewound;
export type Usage = import("./events.js").Usage;
export type GenerationEvent = import("./events.js").GenerationEvent;
export type Cursor = import("./events.js").Cursor;
export type Model = import("./events.js").Model;
export type SessionInfo = import("./events.js").SessionInfo;
export type SessionText = import("./events.js").SessionText;
export type TextPart = import("./events.js").TextPart;
export type ListedSession = import("./events.js").ListedSession;
export type Sampling = import("./events.js").Sampling;
export type GenerateOptions = import("./events.js").GenerateOptions;
export type SessionGenerateOptions = import("./events.js").SessionGenerateOptions;
export type Status = import("./events.js").Status;
/**
 * All of it may be left out.
 *
 * `timeoutS`: silence after which a connection on which something is awaited counts as lost.
 * `maxTries`: how often in a row the server may be out of reach before what waits for it fails,
 * and how often a request is sent again without coming further; 0 never takes anything up again.
 * `maxUnread`: events of one generation that may wait to be read. `WebSocket`: needed before
 * Node 22, as the package `ws` has it. `fetch`, `timers` and `random` are for tests.
 */
export type ClientOptions = {
    apiKey?: string | null | undefined;
    /**
     * 60
     */
    timeoutS?: number | undefined;
    /**
     * 8
     */
    maxTries?: number | undefined;
    /**
     * 16,384
     */
    maxUnread?: number | undefined;
    onStatus?: ((status: Status) => void) | undefined;
    WebSocket?: any;
    fetch?: typeof fetch | undefined;
    timers?: import("./link.js").Timers | undefined;
    random?: (() => number) | undefined;
};
import { Generation } from "./generation.js";
import { Session } from "./session.js";
export { Generation, Session };
