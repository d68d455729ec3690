/**
 * Fields as JSON, without those that are undefined or null.
 * @param {Record<string, unknown>} fields
 * @returns {string}
 * @throws {InvalidRequest} naming the field
 */
export function encode(fields: Record<string, unknown>): string;
