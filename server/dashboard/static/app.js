/** Puts the page together: each snapshot of the feed is drawn by all parts, and the chat's requests are lit up. */

import { hasKey, setKey } from "./api.js";
import { MAX_LANES, batchInWords, drawBatch } from "./batch.js";
import { Chat } from "./chat.js";
import { Feed } from "./feed.js";
import { Gauges } from "./gauges.js";
import { Requests, drawTree } from "./lists.js";
import { REDUCED_MOTION, count, palette, plural, write } from "./look.js";
import { Pool, poolInWords } from "./pool.js";

const element = (id) => document.getElementById(id);
const CALM_MS = 1000; // between two drawings where motion is to be reduced
const WORDS_MS = 3000; // between two descriptions for screen readers
const STATES = { ready: ["live", "good"], loading: ["loading", "wait"], draining: ["draining", "bad"], unreachable: ["engine unreachable", "bad"] };

let snapshot = null;
let colours = palette();
let [drawnAt, wordedAt] = [-Infinity, -Infinity];
let mine = new Set(); // ids of this page's own requests

const pool = new Pool(element("pool"), element("pool-readout"));
const requests = new Requests(element("requests"), () => redraw());
const gauges = new Gauges();
const chat = new Chat({ keyNeeded, started: (id) => (mine = new Set([...mine].slice(-16)).add(id)) });
const feed = new Feed({ snapshot: show, state: showState, keyNeeded });

function show(next) {
  snapshot = next;
  chat.model = next.model;
  showState(...(STATES[next.state] ?? [next.state, "bad"]));
  write("model", next.model ?? "");
  element("notice").hidden = next.notice === null;
  write("notice", next.notice ?? "");
  gauges.draw(next);
  const now = performance.now();
  if (REDUCED_MOTION.matches && now - drawnAt < CALM_MS) return;
  redraw();
}

function showState(text, tone) {
  write("state", text);
  element("state").dataset.tone = tone;
}

function redraw() {
  if (!snapshot) return;
  drawnAt = performance.now();
  const { picture, stats } = snapshot;
  for (const name of ["pool", "batch", "requests", "tree"]) document.querySelector(`.${name}`).hidden = !picture;
  if (!picture) return;
  const isMine = (request) => [...mine].some((id) => request.name && id.startsWith(request.name));
  const lit = new Set([...picture.running, ...picture.waiting].filter(isMine).map((request) => request.number));
  for (const number of ownedBefore(picture, lit)) lit.add(number);
  requests.draw(picture, colours, lit);
  pool.draw(picture, colours, lit, requests.picked);
  drawBatch(element("batch"), picture, colours, lit, requests.picked);
  drawTree(element("tree"), picture);
  writeSummaries(picture, stats);
}

/** Own requests that have ended and still stand in the lanes. */
const owned = new Set();
function ownedBefore(picture, lit) {
  for (const number of lit) owned.add(number);
  const drawn = new Set(picture.steps.spans.map((span) => span[1]));
  for (const number of owned) if (!drawn.has(number) && !lit.has(number)) owned.delete(number);
  return owned;
}

function writeSummaries(picture, stats) {
  const { per_cell: perCell } = picture.pages;
  const size = `${plural(stats.pages_total, "page")} of ${picture.page_size} tokens`;
  write("pool-summary", perCell === 1 ? size : `${size}; a cell is ${perCell} pages`);
  write("count-active", count(stats.pages_active - stats.pages_shared));
  write("count-shared", count(stats.pages_shared));
  write("count-cached", count(stats.pages_cached));
  write("count-free", count(stats.pages_free));
  element("host").hidden = !stats.host_pages_total;
  write("count-host", `${count(stats.host_pages_held)} of ${count(stats.host_pages_total)}`);
  const slots = picture.max_num_seqs;
  const hidden = slots > MAX_LANES ? `, the first ${MAX_LANES} shown` : "";
  write("batch-summary", `${count(stats.num_running)} of ${plural(slots, "slot")} taken${hidden}`);
  const listed = picture.waiting.length;
  const unlisted = stats.num_waiting - listed;
  write("requests-summary", unlisted > 0 ? `${count(unlisted)} more waiting` : plural(picture.running.length + listed, "request"));
  write("tree-summary", `${count(stats.pages_cached)} cached, ${count(stats.prefix_cache_evictions_total)} evicted so far`);
  if (performance.now() - wordedAt < WORDS_MS) return;
  wordedAt = performance.now();
  element("pool").setAttribute("aria-label", poolInWords(stats));
  element("batch").setAttribute("aria-label", batchInWords(picture));
}

function keyNeeded(message) {
  element("key-wrong").hidden = !hasKey(); // nothing is wrong with one that was not given yet
  element("key-wrong").textContent = message;
  if (!element("key-dialog").open) element("key-dialog").showModal();
}

element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(element("key").value.trim());
  element("key").value = "";
  element("key-dialog").close();
  feed.update();
});
element("pause").addEventListener("click", (event) => {
  const paused = event.currentTarget.getAttribute("aria-pressed") !== "true";
  event.currentTarget.setAttribute("aria-pressed", String(paused));
  feed.pause(paused);
});
element("pool").addEventListener("change", redraw);
new ResizeObserver(redraw).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours = palette();
  redraw();
});
feed.update();
