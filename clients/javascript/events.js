// What the server sends and takes, as types. Fields have the names that the protocol gives them,
// and an event is the very object that was parsed from its frame.

/**
 * Tokens of one request.
 * @typedef {object} Usage
 * @property {number} prompt_tokens
 * @property {number} completion_tokens
 * @property {number} total_tokens
 */

/**
 * The generation has its session, which has had `seq` events; `seed` repeats it.
 * @typedef {object} Started
 * @property {"started"} type
 * @property {string} session
 * @property {string} epoch
 * @property {number} seq
 * @property {number} position
 * @property {number} seed
 */

/**
 * One generated token; `text` is what became safe to show, often empty.
 * With `top_logprobs` it has its `logprob`, and those of the most probable tokens, best first.
 * @typedef {object} Token
 * @property {"token"} type
 * @property {number} seq
 * @property {number} position
 * @property {number} token_id
 * @property {string} text
 * @property {number} [logprob]
 * @property {{token_id: number, logprob: number}[]} [top_logprobs]
 */

/**
 * The end of a generation; `text` is what was still held back.
 * @typedef {object} Finished
 * @property {"finished"} type
 * @property {string | null} session
 * @property {number} seq
 * @property {number} position
 * @property {string} text
 * @property {"stop" | "length" | "cancelled" | "error"} finish_reason
 * @property {Usage} usage
 * @property {string} [error]
 */

/**
 * The events after `seq` follow: up to `last_seq` at once, and more if it is `busy`.
 * @typedef {object} Resumed
 * @property {"resumed"} type
 * @property {string} session
 * @property {string} epoch
 * @property {number} seq
 * @property {number} last_seq
 * @property {number} position
 * @property {boolean} busy
 */

/**
 * The events that were asked for cannot be had; those after `seq` follow.
 * @typedef {object} Reset
 * @property {"reset"} type
 * @property {string} session
 * @property {string} epoch
 * @property {number} seq
 * @property {number} last_seq
 * @property {number} position
 * @property {boolean} busy
 * @property {string} reason
 */

/**
 * The session has read what was appended; `logprobs` has the natural logarithm of each
 * token's probability, if that was asked for.
 * @typedef {object} Appended
 * @property {"appended"} type
 * @property {string} session
 * @property {number} position
 * @property {Usage} usage
 * @property {(number | null)[]} [logprobs]
 */

/**
 * The session's text was cut back; its events go on from `seq` in a new epoch.
 * @typedef {object} Rewound
 * @property {"rewound"} type
 * @property {string} session
 * @property {string} epoch
 * @property {number} seq
 * @property {number} position
 */

/**
 * What iterating over a generation gives.
 * @typedef {Token | Finished | Reset} GenerationEvent
 */

/**
 * A place in a session's events: all that it takes to read on after it.
 * @typedef {object} Cursor
 * @property {string} session
 * @property {string} epoch
 * @property {number} last_seq
 */

/**
 * A kept session as the server sees it. `parked`: what it runs rests until somebody reads it.
 * @typedef {object} SessionInfo
 * @property {string} session
 * @property {string} epoch
 * @property {number} position
 * @property {number} seq
 * @property {boolean} busy
 * @property {boolean} parked
 * @property {number} idle_s
 * @property {number} state_bytes
 */

/**
 * A kept session in the list of them, awake or asleep.
 * @typedef {object} ListedSession
 * @property {string} session
 * @property {string} epoch
 * @property {number} position
 * @property {number} seq
 * @property {boolean} busy
 * @property {number} stored_bytes
 */

/**
 * A model in the list of them; the server adds what is its own under `everstream`.
 * @typedef {object} Model
 * @property {string} id
 * @property {string} object
 * @property {number} created
 * @property {string} owned_by
 * @property {Record<string, any>} everstream
 */

/**
 * How to sample; the server's defaults hold for what is left out.
 * @typedef {object} Sampling
 * @property {number} [max_tokens]
 * @property {number} [temperature]
 * @property {number} [top_k]
 * @property {number} [top_p]
 * @property {number} [min_p]
 * @property {number} [typical_p]
 * @property {number} [repetition_penalty]
 * @property {number} [presence_penalty]
 * @property {number} [frequency_penalty]
 * @property {Record<string, number>} [logit_bias]
 * @property {number} [top_logprobs]
 * @property {Record<string, any>} [response_format]
 * @property {number} [seed]
 * @property {string | string[]} [stop]
 * @property {number[]} [stop_token_ids]
 * @property {boolean} [ignore_eos]
 */

/**
 * `idempotency_key`: your own name for a piece of work that must be done once, also if you ask
 * again in another process. `signal` ends the generation when it aborts.
 * @typedef {Sampling & {idempotency_key?: string, signal?: AbortSignal}} SessionGenerateOptions
 */

/**
 * `session` goes on with that one; `keep` keeps the new one.
 * @typedef {SessionGenerateOptions & {model?: string, session?: string, keep?: boolean}} GenerateOptions
 */

/**
 * What `onStatus` is told. "waiting": the next try is in `delayMs`; "refused": there is none
 * before `connect` is called, because of `error`; "idle": nothing wants a connection.
 * @typedef {{state: "connecting"} | {state: "open"} | {state: "idle"}
 *   | {state: "waiting", reason: string, delayMs: number}
 *   | {state: "refused", error: Error}} Status
 */

export {};
