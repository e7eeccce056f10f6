/** The chat box: streams answers through the server's own API, and tells which request is whose. */

import { KeyNeeded, ask } from "./api.js";
import { plural, seconds } from "./look.js";
import { events } from "./sse.js";

export class Chat {
  /** `on` has keyNeeded(message) and started(id): the id of the request that answers. */
  constructor(on) {
    this.on = on;
    this.model = null;
    this.messages = [];
    this.running = null; // the answer's AbortController
    this.log = document.getElementById("log");
    this.question = document.getElementById("question");
    this.send = document.getElementById("send");
    document.getElementById("clear").addEventListener("click", () => this.clear());
    document.getElementById("chat").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.submit();
    });
    this.question.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.submit();
    });
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    for (const message of this.log.querySelectorAll(".message")) message.remove();
    document.getElementById("log-empty").hidden = false;
    this.question.focus();
  }

  async submit() {
    const text = this.question.value.trim();
    if (!text) return;
    this.question.value = "";
    document.getElementById("log-empty").hidden = true;
    this.messages.push({ role: "user", content: text });
    this.show("user", text);
    const messages = this.messages;
    const answer = this.show("assistant", "");
    const running = (this.running = new AbortController());
    this.update(answer, true);
    try {
      const content = await this.answer(messages, answer, running.signal);
      messages.push({ role: "assistant", content });
    } catch (error) {
      messages.pop(); // a question without an answer is no part of the conversation
      if (error instanceof KeyNeeded) this.on.keyNeeded(error.message);
      const stopped = running.signal.aborted;
      answer.meta.textContent = stopped ? "stopped" : error.message;
      answer.element.classList.toggle("failed", !stopped);
    }
    this.running = null;
    this.update(answer, false);
  }

  async answer(messages, answer, signal) {
    const start = performance.now();
    const number = (id) => Number(document.getElementById(id).value);
    const response = await ask("v1/chat/completions", {
      signal,
      body: {
        model: this.model,
        messages,
        max_tokens: number("max-tokens"),
        temperature: number("temperature"),
        stream: true,
        stream_options: { include_usage: true },
      },
    });
    let [content, usage, reason, firstMs] = ["", null, null, null];
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (firstMs === null) {
        firstMs = performance.now() - start;
        this.on.started(chunk.id);
      }
      usage = chunk.usage ?? usage;
      const [choice] = chunk.choices;
      reason = choice?.finish_reason ?? reason;
      if (choice?.delta.content) {
        content += choice.delta.content;
        this.keepAtEnd(() => answer.text.data = content);
      }
    }
    const rest = (performance.now() - start - firstMs) / 1000;
    const tokens = usage?.completion_tokens ?? 0;
    this.keepAtEnd(() => {
      answer.meta.textContent = [
        plural(tokens, "token"),
        `first after ${seconds(firstMs / 1000)}`,
        tokens > 1 && `${((tokens - 1) / rest).toFixed(1)} tokens/s`,
        usage?.prompt_tokens_details?.cached_tokens && `${plural(usage.prompt_tokens_details.cached_tokens, "prompt token")} from the cache`,
        reason !== "stop" && `ended by ${reason}`,
      ].filter(Boolean).join(", ");
    });
    return content;
  }

  /** A message as text, never as HTML. */
  show(role, content) {
    const element = document.createElement("div");
    element.className = `message ${role}`;
    const who = document.createElement("span");
    who.className = "hidden";
    who.textContent = role === "user" ? "You: " : "Model: ";
    const text = document.createTextNode(content);
    const meta = document.createElement("span");
    meta.className = "meta";
    element.append(who, text);
    if (role === "assistant") element.append(meta);
    this.keepAtEnd(() => this.log.append(element), true);
    return { element, text, meta };
  }

  /** Changes the log, and scrolls on unless the reader has scrolled back. */
  keepAtEnd(change, always = false) {
    const { log } = this;
    const atEnd = always || log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    change();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  update(answer, isRunning) {
    answer.element.classList.toggle("running", isRunning);
    this.log.setAttribute("aria-busy", String(isRunning)); // read out whole, not token by token
    this.send.textContent = isRunning ? "Stop" : "Send";
    this.send.classList.toggle("stop", isRunning);
  }
}
