// The clients that the checks use, and what they ask.
import OpenAI from "openai";

export const MODEL = "everstream-stories";
export const PROMPT = "Once upon a time";
export const QUESTION = [{ role: "user", content: "Tell me of the old mill." }];
export const BASE = `${process.env.EVERSTREAM_URL}/v1`;

/** The usual key may do all that a client does; others are in the tests' `conftest.py`. */
export function client(key = "usual", options = {}) {
  return new OpenAI({ baseURL: BASE, apiKey: key, maxRetries: 0, ...options });
}

export async function all(iterable) {
  const found = [];
  for await (const each of iterable) found.push(each);
  return found;
}
