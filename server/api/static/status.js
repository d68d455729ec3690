// How the connection is, in the masthead, and the question for a key.

const WORDS = { connecting: "Connecting", open: "Connected", key: "Key wanted", idle: "Not connected" };

/** Shows what `Server` tells of its connection. */
export class Status {
  #countdown = null;

  constructor(find, server) {
    this.find = find;
    find("retry").addEventListener("click", () => server.connect());
    find("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const key = find("key").value.trim();
      find("key").value = "";
      server.useKey(key);
    });
  }

  /** Takes one status. */
  show(status) {
    const { find } = this;
    clearInterval(this.#countdown);
    find("connection").dataset.state = status.state;
    find("retry").hidden = status.state !== "waiting";
    find("connection-text").textContent = WORDS[status.state] ?? sentence(status);
    find("countdown").textContent = "";
    if (status.state === "waiting") this.#countDown(status.delayMs);
    if (status.state !== "connecting") this.#showKeyForm(status);
  }

  #countDown(delayMs) {
    const until = performance.now() + delayMs;
    const show = () => {
      const seconds = Math.max(1, Math.ceil((until - performance.now()) / 1000));
      this.find("countdown").textContent = `Trying again in ${seconds}\u00a0s`;
    };
    show();
    this.#countdown = setInterval(show, 1000);
  }

  #showKeyForm({ state, rejected }) {
    const { find } = this;
    find("key-form").hidden = state !== "key";
    if (state !== "key") return;
    find("key-hint").textContent = rejected
      ? "The server did not accept that key."
      : "It is kept in this browser tab only.";
    find("key").focus();
  }
}

function sentence({ reason, error }) {
  const words = reason ?? error?.message ?? "the connection was lost";
  return `${words[0].toUpperCase()}${words.slice(1)}.`;
}
