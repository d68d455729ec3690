/** A name for a piece of work that nobody else gives one. */
export function newKey(): string;
/** How often a request was sent again since it last came further. */
export class Tries {
    /** @param {number} max */
    constructor(max: number);
    max: number;
    count: number;
    /** Whether there is one more, which this takes. */
    take(): boolean;
    /**
     * What an error frame means: "move", seconds to wait, or null where the request has failed.
     * @param {any} event
     * @returns {"move" | number | null}
     */
    verdict(event: any): "move" | number | null;
}
