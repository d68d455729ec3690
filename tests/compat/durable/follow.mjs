// Follows one turn of a session with the client of the protocol, to its end: a line for each batch.
// Where a connection breaks within an answer the client fails, and is started again from its offset.
import { DurableStream, stream } from "@durable-streams/client";

const { EVERSTREAM_URL, SESSION, TURN, LIVE } = process.env;
const url = `${EVERSTREAM_URL}/v1/sessions/${SESSION}/stream?turn=${TURN}`;
const headers = { authorization: "Bearer usual" };

let [offset, isClosed] = ["-1", false];

/** Prints each batch until the last one has come. */
async function follow(answer) {
  await new Promise((resolve, reject) => {
    answer.subscribeJson((batch) => {
      console.log(JSON.stringify(batch.items));
      ({ offset, streamClosed: isClosed } = batch);
      if (isClosed) resolve();
    });
    answer.closed.catch(reject);
  });
}

while (!isClosed) {
  try {
    await follow(await stream({ url, headers, offset, live: LIVE, json: true }));
  } catch (error) {
    console.error(`again from ${offset}: ${error}`);
  }
}
const { streamClosed, offset: end } = await new DurableStream({ url, headers }).head();
console.log(JSON.stringify({ streamClosed, isEnd: offset === end }));
