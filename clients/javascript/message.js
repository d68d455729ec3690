// Encodes messages as JSON, with errors that name the field that JSON cannot represent.

import { InvalidRequest } from "./errors.js";

/**
 * Throws for a number that JSON would turn into null, which means the default.
 * @param {string} name
 * @param {unknown} value
 */
function finite(name, value) {
  if (typeof value === "number" && !Number.isFinite(value)) throw new TypeError(`${value}`);
  return value;
}

/**
 * Encodes the fields that are neither undefined nor null.
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
