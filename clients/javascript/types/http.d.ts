/** Requests of a client, each with its key. */
export class Http {
    /**
     * @param {string} baseUrl without a slash at its end
     * @param {() => string | null} key
     * @param {typeof fetch} fetch
     * @param {number} timeoutS
     */
    constructor(baseUrl: string, key: () => string | null, fetch: typeof globalThis.fetch, timeoutS: number);
    baseUrl: string;
    key: () => string | null;
    fetch: typeof fetch;
    timeoutS: number;
    /**
     * The JSON of an answer.
     * @param {string} method
     * @param {string} path
     * @param {BodyInit} [body] a session's file
     * @returns {Promise<any>}
     */
    json(method: string, path: string, body?: BodyInit): Promise<any>;
    /**
     * The bytes of an answer.
     * @param {string} path
     * @returns {Promise<Uint8Array>}
     */
    bytes(path: string): Promise<Uint8Array>;
    #private;
}
