// The clients that the checks use, and what they ask.
import Anthropic from "@anthropic-ai/sdk";

export const MODEL = "everstream-stories";
export const QUESTION = [{ role: "user", content: "Tell me of the old mill." }];

/** The usual key may do all that a client does; others are in the tests' `conftest.py`. */
export function client(key = "usual", options = {}) {
  const baseURL = process.env.EVERSTREAM_URL;
  return new Anthropic({ baseURL, apiKey: key, maxRetries: 0, ...options });
}
