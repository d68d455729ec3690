/**
 * Tokens of one request.
 */
export type Usage = {
    prompt_tokens: number;
    completion_tokens: number;
    total_tokens: number;
};
/**
 * The generation has its session, which has had `seq` events; `seed` repeats it.
 */
export type Started = {
    type: "started";
    session: string;
    epoch: string;
    seq: number;
    position: number;
    seed: number;
};
/**
 * One generated token; `text` is what became safe to show, often empty.
 * With `top_logprobs` it has its `logprob`, and those of the most probable tokens, best first.
 */
export type Token = {
    type: "token";
    seq: number;
    position: number;
    token_id: number;
    text: string;
    logprob?: number | undefined;
    top_logprobs?: {
        token_id: number;
        logprob: number;
    }[] | undefined;
};
/**
 * The end of a generation; `text` is what was still held back.
 */
export type Finished = {
    type: "finished";
    session: string | null;
    seq: number;
    position: number;
    text: string;
    finish_reason: "stop" | "length" | "cancelled" | "error";
    usage: Usage;
    error?: string | undefined;
};
/**
 * The events after `seq` follow: up to `last_seq` at once, and more if it is `busy`.
 */
export type Resumed = {
    type: "resumed";
    session: string;
    epoch: string;
    seq: number;
    last_seq: number;
    position: number;
    busy: boolean;
};
/**
 * The events that were asked for cannot be had; those after `seq` follow.
 */
export type Reset = {
    type: "reset";
    session: string;
    epoch: string;
    seq: number;
    last_seq: number;
    position: number;
    busy: boolean;
    reason: string;
};
/**
 * The session has read what was appended; `logprobs` has the natural logarithm of each
 * token's probability, if that was asked for.
 */
export type Appended = {
    type: "appended";
    session: string;
    position: number;
    usage: Usage;
    logprobs?: (number | null)[] | undefined;
};
/**
 * The session's text was cut back; its events go on from `seq` in a new epoch.
 */
export type Rewound = {
    type: "rewound";
    session: string;
    epoch: string;
    seq: number;
    position: number;
};
/**
 * What iterating over a generation gives.
 */
export type GenerationEvent = Token | Finished | Reset;
/**
 * A place in a session's events: all that it takes to read on after it.
 */
export type Cursor = {
    session: string;
    epoch: string;
    last_seq: number;
};
/**
 * A kept session as the server sees it. `parked`: what it runs rests until somebody reads it.
 */
export type SessionInfo = {
    session: string;
    epoch: string;
    position: number;
    seq: number;
    busy: boolean;
    parked: boolean;
    idle_s: number;
    state_bytes: number;
};
/**
 * A kept session in the list of them, awake or asleep.
 */
export type ListedSession = {
    session: string;
    epoch: string;
    position: number;
    seq: number;
    busy: boolean;
    stored_bytes: number;
};
/**
 * A model in the list of them; the server adds what is its own under `everstream`.
 */
export type Model = {
    id: string;
    object: string;
    created: number;
    owned_by: string;
    everstream: Record<string, any>;
};
/**
 * How to sample; the server's defaults hold for what is left out.
 */
export type Sampling = {
    max_tokens?: number | undefined;
    temperature?: number | undefined;
    top_k?: number | undefined;
    top_p?: number | undefined;
    min_p?: number | undefined;
    typical_p?: number | undefined;
    repetition_penalty?: number | undefined;
    presence_penalty?: number | undefined;
    frequency_penalty?: number | undefined;
    logit_bias?: Record<string, number> | undefined;
    top_logprobs?: number | undefined;
    response_format?: Record<string, any> | undefined;
    seed?: number | undefined;
    stop?: string | string[] | undefined;
    stop_token_ids?: number[] | undefined;
    ignore_eos?: boolean | undefined;
};
/**
 * `idempotency_key`: your own name for a piece of work that must be done once, also if you ask
 * again in another process. `signal` ends the generation when it aborts.
 */
export type SessionGenerateOptions = Sampling & {
    idempotency_key?: string;
    signal?: AbortSignal;
};
/**
 * `session` goes on with that one; `keep` keeps the new one.
 */
export type GenerateOptions = SessionGenerateOptions & {
    model?: string;
    session?: string;
    keep?: boolean;
};
/**
 * What `onStatus` is told. "waiting": the next try is in `delayMs`; "refused": there is none
 * before `connect` is called, because of `error`; "idle": nothing wants a connection.
 */
export type Status = {
    state: "connecting";
} | {
    state: "open";
} | {
    state: "idle";
} | {
    state: "waiting";
    reason: string;
    delayMs: number;
} | {
    state: "refused";
    error: Error;
};
