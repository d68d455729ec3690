"""A socket whose server goes away and comes back: the package itself connects again.

Run by the outer test, which restarts the server when it reads ``ready``. Prints the
code of the close and, in the end, whether the second response went on from the first.
"""

from __future__ import annotations

from check_websocket import one_response
from openai.types.websocket_reconnection import ReconnectingEvent
from served import MODEL, PROMPT, client


def main() -> None:
    api = client()

    def ask_again(event: ReconnectingEvent) -> None:
        """What is sent meanwhile waits until the socket is there again."""
        if event.attempt == 1:
            print("closed", event.close_code, flush=True)
            connection.response.create(
                model=MODEL, input="And then?", previous_response_id=first, max_output_tokens=8
            )

    patience = {"max_retries": 1000, "initial_delay": 0.2, "max_delay": 0.5}
    with api, api.responses.connect(on_reconnecting=ask_again, **patience) as connection:
        connection.response.create(model=MODEL, input=PROMPT, max_output_tokens=8)
        first = one_response(connection)[-1].response.id
        print("ready", flush=True)
        last = one_response(connection)[-1]
    went_on = last.response.previous_response_id == first and last.response.output_text
    print("went on" if went_on else last, flush=True)


if __name__ == "__main__":
    main()
