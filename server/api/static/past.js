// Reads the text of sessions that another one is a copy of: a copy's own log begins where it was made.

import { EverstreamError } from "./client/everstream.js";
import { Transcript } from "./transcript.js";

/**
 * The text of the first of `lineage` up to where it was left, as far as the server still has it.
 * `shown(id)` is the transcript of a session that the page shows, or undefined.
 */
export async function readPast(server, lineage, shown) {
  if (lineage.length === 0) return new Transcript();
  const [{ id, at }, ...older] = lineage;
  const transcript = shown(id) ?? (await readSession(server, id, at, await readPast(server, older, shown)));
  return transcript.copy(at);
}

/** Adds what the session `id` has written up to position `at` to `transcript`, and returns it. */
async function readSession(server, id, at, transcript) {
  transcript.prompts = await server.promptsOf(id);
  const generation = server.client.resume(id, { last_seq: 0 });
  try {
    for await (const event of generation) {
      if (event.type === "token") transcript.addToken(event);
      else if (event.type === "finished") transcript.finish(event);
      if (event.position >= at) {
        await generation.detach(); // what it runs goes on
        break;
      }
    }
  } catch (error) {
    if (!(error instanceof EverstreamError)) throw error;
  }
  return transcript;
}
