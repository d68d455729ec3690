// JSON of what a client says, with errors that name the field which no JSON can carry.

import { InvalidRequest } from "./errors.js";

/**
 * A number that JSON would silently turn into null, which means the default.
 * @param {string} name
 * @param {unknown} value
 */
function finite(name, value) {
  if (typeof value === "number" && !Number.isFinite(value)) throw new TypeError(`${value}`);
  return value;
}

/**
 * Fields as JSON, without those that are undefined or null.
 * @param {Record<string, unknown>} fields
 * @returns {string}
 * @throws {InvalidRequest} naming the field
 */
export function encode(fields) {
  const members = [];
  for (const [name, value] of Object.entries(fields)) {
    if (value === undefined || value === null) continue;
    let text;
    try {
      text = JSON.stringify(value, finite);
    } catch (error) {
      const why = /** @type {Error} */ (error).message;
      throw new InvalidRequest(`${name}: no JSON has this: ${why}`, "invalid_value", name);
    }
    if (text === undefined) {
      throw new InvalidRequest(`${name}: no JSON has this`, "invalid_value", name);
    }
    members.push(`${JSON.stringify(name)}:${text}`);
  }
  return `{${members.join(",")}}`;
}
