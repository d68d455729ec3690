/** Made by `Client.createSession`, `Client.session`, `Client.importSession` and `fork`. */
export class Session {
    /**
     * @param {import("./everstream.js").Client} client
     * @param {string} id
     * @param {(kind: string, message: Record<string, unknown>) => Promise<any>} ask
     * @param {import("./http.js").Http} http
     */
    constructor(client: import("./everstream.js").Client, id: string, ask: (kind: string, message: Record<string, unknown>) => Promise<any>, http: import("./http.js").Http);
    client: import("./everstream.js").Client;
    id: string;
    /**
     * Goes on with the session's text, after `prompt` if there is one. It starts at once.
     * @param {string | number[]} [prompt] text or token ids
     * @param {import("./events.js").SessionGenerateOptions} [options]
     * @returns {import("./generation.js").Generation}
     */
    generate(prompt?: string | number[], options?: import("./events.js").SessionGenerateOptions): import("./generation.js").Generation;
    /**
     * Lets the session read `text`, or token ids, without generating. With `logprobs` the answer
     * says how probable each token was. What comes twice under one `idempotency_key` is read
     * once, and answered twice.
     *
     * @param {string | number[]} text
     * @param {{logprobs?: boolean, idempotency_key?: string}} [options]
     * @returns {Promise<import("./events.js").Appended>}
     */
    append(text: string | number[], { logprobs, idempotency_key }?: {
        logprobs?: boolean;
        idempotency_key?: string;
    }): Promise<import("./events.js").Appended>;
    /**
     * `n` copies, as the session is, or as it was when it had `at` tokens.
     * @param {number} [n]
     * @param {number} [at]
     * @returns {Promise<Session[]>}
     */
    fork(n?: number, at?: number): Promise<Session[]>;
    /**
     * Cuts the text back to `at` tokens; the session's epoch is a new one.
     * @param {number} at
     * @returns {Promise<import("./events.js").Rewound>}
     */
    rewind(at: number): Promise<import("./events.js").Rewound>;
    /**
     * Ends what the session runs, also where nobody reads it.
     * @returns {Promise<import("./events.js").SessionInfo>}
     */
    cancel(): Promise<import("./events.js").SessionInfo>;
    /**
     * Position, epoch, idle seconds and bytes.
     * @returns {Promise<import("./events.js").SessionInfo>}
     */
    info(): Promise<import("./events.js").SessionInfo>;
    /**
     * What it has read and generated, from token `start` on, or from the oldest that is kept.
     * @param {number} [start]
     * @returns {Promise<import("./events.js").SessionText>}
     */
    text(start?: number): Promise<import("./events.js").SessionText>;
    /** The session as it is now, as one signed file. */
    export(): Promise<Uint8Array<ArrayBufferLike>>;
    /** Forgets it. */
    delete(): Promise<void>;
    #private;
}
