/** Writes the gauges; owns the short memory that a rate needs. */

import { count, seconds, write } from "./look.js";

const RATE_S = 2; // over which tokens are counted
const MEMORY_S = 60;

export class Gauges {
  constructor() {
    this.samples = []; // [time, output tokens], newest last
    this.rates = [];
  }

  draw(snapshot) {
    const { stats, latency, time } = snapshot;
    write("first-token", seconds(latency.first_token.p50));
    write("first-token-p95", seconds(latency.first_token.p95));
    write("token-gap", seconds(latency.token_gap.p50));
    write("token-gap-p95", seconds(latency.token_gap.p95));
    if (!stats) return;
    write("running", count(stats.num_running));
    write("waiting", count(stats.num_waiting));
    write("rate", this.rate(time, stats.output_tokens_total));
    document.getElementById("spark").setAttribute("points", this.line(time));
    const asked = stats.prefix_cache_queries_total;
    write("hits", asked ? `${Math.round((100 * stats.prefix_cache_hits_total) / asked)}%` : "–");
    write("preemptions", count(stats.preemptions_total));
    write("compilations", count(stats.compilations_after_ready));
    write("compilations-total", count(stats.compilations_total));
    document.getElementById("compilations-gauge").classList.toggle("alarm", stats.compilations_after_ready > 0);
  }

  rate(time, tokens) {
    const newest = this.samples.at(-1);
    if (newest && (tokens < newest[1] || time < newest[0])) this.samples = this.rates = []; // another server now
    this.samples = [...this.samples.filter(([then]) => time - then <= RATE_S), [time, tokens]];
    const [then, before] = this.samples[0];
    if (time - then < RATE_S / 4) return "–";
    const rate = (tokens - before) / (time - then);
    this.rates = [...this.rates.filter(([moment]) => time - moment <= MEMORY_S), [time, rate]];
    return rate < 10 ? rate.toFixed(1) : count(Math.round(rate));
  }

  /** The last minute as the points of a polyline, 120 × 20. */
  line(time) {
    const highest = Math.max(1, ...this.rates.map(([, rate]) => rate));
    return this.rates
      .map(([then, rate]) => `${(120 * (1 - (time - then) / MEMORY_S)).toFixed(1)},${(18.5 - (17 * rate) / highest).toFixed(1)}`)
      .join(" ");
  }
}
