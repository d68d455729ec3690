// What a typed program says: it compiles, and with a wrong name in it, it does not.

import { CapacityExhausted, Client, type Cursor, type Token } from "everstream";

export async function main(client: Client): Promise<Cursor | null> {
  const tokens: Token[] = [];
  const generation = client.complete("x", { max_tokens: 5, keep: true, stop: ["."] });
  for await (const event of generation) {
    if (event.type === "token") {
      const id: number = event.token_id;
      tokens.push({ ...event, token_id: id });
    } else if (event.type === "reset") {
      const reason: string = event.reason;
      throw new Error(reason);
    } else {
      const used: number = event.usage.total_tokens;
      console.log(used, event.finish_reason === "stop");
    }
  }
  const [fork] = await client.session("sess_1").fork(1, 3);
  await fork?.append([1, 2], { logprobs: true }).catch((error: unknown) => {
    if (error instanceof CapacityExhausted) console.log(error.retryAfterS?.toFixed(1));
  });
  for await (const one of client.sessions()) console.log(one.listed?.stored_bytes, await one.info());
  return generation.cursor;
}
