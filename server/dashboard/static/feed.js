/** Keeps the connection to the live feed: opens it again when it breaks, closes it while nobody looks. */

import { KeyNeeded, ask } from "./api.js";
import { events } from "./sse.js";

const RETRY_MS = 2000;

export class Feed {
  /** `on` has snapshot(data), state(text, tone) and keyNeeded(message). */
  constructor(on) {
    this.on = on;
    this.paused = false;
    this.connection = null;
    document.addEventListener("visibilitychange", () => this.update());
  }

  pause(paused) {
    this.paused = paused;
    this.update();
  }

  /** Connects or leaves, as it should be now. */
  update() {
    const wanted = !this.paused && document.visibilityState === "visible";
    if (wanted && !this.connection) {
      this.connection = new AbortController();
      this.follow(this.connection);
    } else if (!wanted && this.connection) {
      this.connection.abort();
      this.connection = null;
    }
    if (this.paused) this.on.state("paused", "wait");
  }

  async follow(connection) {
    while (!connection.signal.aborted) {
      try {
        const response = await ask("dashboard/feed", { signal: connection.signal });
        for await (const data of events(response)) {
          if (connection.signal.aborted) return;
          this.on.snapshot(JSON.parse(data));
        }
        this.on.state("the server closed", "bad");
      } catch (error) {
        if (connection.signal.aborted) return;
        if (error instanceof KeyNeeded) {
          this.connection = null;
          this.on.state("a key is needed", "wait");
          this.on.keyNeeded(error.message);
          return;
        }
        this.on.state("not reachable, trying again", "bad");
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
}
