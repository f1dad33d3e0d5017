// One job: its speed-up curve, its numbers over time, its pauses, its workers and what happened to it; actions.

import { $, bytes, clock, h, metricOf, niceTime, number, percent, span, table } from "./dom.js";
import { chart, splitBars, whole } from "./charts.js";

const AGAIN_MS = 2000;
const QUIET_S = 3;
const SLOW = 1.2;
export const [TIME, SAMPLES, BATCH, RATE, WORKERS, NOISE, FACTOR, METRICS] = [0, 1, 2, 3, 4, 5, 6, 7];

export class JobView {
  constructor(store) {
    this.store = store;
    this.job = "";
    this.detail = null;
    this.texts = new Map(); // what a worker prints, and its stack, each by its name
    this.asked = 0;
    this.explained = false;
    this.said = "";
    this.draw();
  }

  choose(job) {
    if (job !== this.job) {
      this.detail = null;
      this.texts.clear();
      this.said = "";
    }
    this.job = job;
    this.load();
  }

  // The job's row has changed: ask again, but not more often than every two seconds.
  update() {
    if (this.job && Date.now() - this.asked > AGAIN_MS && !this.editing()) this.load();
  }

  // Whether somebody is at work in it: what is drawn anew loses the focus.
  editing() {
    return $("detail").contains(document.activeElement);
  }

  async load() {
    const job = this.job;
    this.asked = Date.now();
    try {
      const detail = await (await this.store.ask(`api/jobs/${encodeURIComponent(job)}`)).json();
      if (job === this.job) this.detail = detail;
    } catch (error) {
      this.said = error.message;
    }
    if (job === this.job && !this.editing()) this.draw();
  }

  draw() {
    if (!this.job) {
      $("job").hidden = true;
      return;
    }
    $("job").hidden = false;
    $("h-job").textContent = `Job ${this.job}`;
    const row = this.store.tables.jobs.get(this.job);
    const detail = this.detail;
    const scrolled = new Map([...$("detail").querySelectorAll("pre")].map((text) => [text.id, text.scrollTop]));
    $("detail").replaceChildren(...[
      row ? this.head(row, detail) : null,
      this.store.source.actions && row && row.ended_s === null ? this.actions(row) : null,
      h("p", { id: "said", role: "status" }, this.said),
      detail ? h("div", { class: "charts" }, this.charts(row, detail)) : null,
      detail ? this.workers(detail) : null,
      detail ? this.events(detail) : null,
    ].filter(Boolean));
    for (const [id, top] of scrolled) if ($(id)) $(id).scrollTop = top;
  }

  head(row, detail) {
    const [metric, value] = metricOf(row, this.store.metric);
    const facts = [["phase", row.phase], ["workers", row.workers === row.target ? row.workers : `${row.workers} → ${row.target}`],
      ["batch", row.batch || "–"], ["samples/s", row.samples_per_s ? number(row.samples_per_s) : "–"], ["goodput", number(row.goodput)],
      ...(row.tokens_per_s ? [["tokens/s", number(row.tokens_per_s)], ["tokens left", row.tokens_left === null ? "–" : number(row.tokens_left)]] : []),
      ["efficiency", percent(row.efficiency)], ["progress", percent(row.progress)], ["ETA", span(row.eta_s)],
      [metric || "metric", number(value)], ["resizes", row.resizes], ["MFU", percent(detail?.mfu)],
      ...(row.workers && row.samples_per_s ? [[`${row.tokens_per_s ? "tokens" : "samples"}/s a worker`, number((row.tokens_per_s || row.samples_per_s) / row.workers)]] : []),
      ...(detail?.backend ? [["gradients by", detail.backend]] : []), ...(detail?.memory_bound ? [["samples at once at most", number(detail.memory_bound)]] : []), ["productive", percent(row.productive ?? productive(detail))],
      ["noise scale", detail?.noise_scale === null ? "–" : number(detail?.noise_scale)],
      ["one more worker", detail?.gain === null || detail?.gain === undefined ? "–" : `${detail.gain >= 0 ? "+" : ""}${number(detail.gain)} samples/s`]];
    return h("div", {}, h("div", { class: "facts" }, facts.map(([name, value]) => h("span", {}, h("span", { class: "soft" }, `${name} `), h("b", {}, String(value))))),
      this.why([row.note, row.why].filter(Boolean).join("; "), detail?.explanation),
      detail?.logs ? h("p", { class: "soft" }, "results and logs: ", h("code", {}, detail.logs), "; what it prints: ", h("code", {}, `elastic-ray logs ${row.job}`)) : null);
  }

  // The reason of its size; what was weighed is behind it.
  why(reason, explanation) {
    if (!explanation) return h("p", { class: "words" }, reason);
    const box = h("details", { open: this.explained, ontoggle: () => { this.explained = box.open; } }, h("summary", {}, reason || "why"), h("p", { class: "words" }, explanation));
    return box;
  }

  charts(row, detail) {
    const series = detail.series;
    const begin = series.length ? series[0][TIME] : 0;
    const since = (value) => span(value);
    const overTime = (name, place, more = {}) => ({ name, points: series.map((p) => [p[TIME] === null ? NaN : p[TIME] - begin, p[place]]), ...more });
    const resizes = detail.events.filter(([, , from, to]) => from !== to);
    const marks = resizes.map(([time, kind, from, to]) => [time - begin, `${kind}: ${from} → ${to} workers`]);
    const metric = row ? metricOf(row, this.store.metric)[0] : this.store.metric;
    const told = series.filter((p) => metric in p[METRICS]);
    const samplesAt = (time) => series.find((p) => p[TIME] >= time)?.[SAMPLES] ?? null;
    const here = row?.workers ?? 0;
    const now = detail.curve.find(([workers]) => workers === here);
    const unit = this.store.source.kind === "files" ? "reports" : "samples";
    const shares = Object.entries(detail.shares);
    return [
      chart({ title: "Goodput over workers", xName: "workers", pace: whole, lines: [
        { name: "fitted", points: detail.curve }, { name: "measured", points: detail.measured, dots: true },
        { name: "present size", points: now ? [now] : [], dots: true, size: 6 }] }),
      chart({ title: "Batch and noise scale", xName: "since the page saw it first", xText: since, pace: niceTime, marks, lines: [
        overTime("batch", BATCH), overTime("noise scale", NOISE, { right: true }), overTime("learning-rate factor", FACTOR, { right: true, dashed: true })] }),
      chart({ title: `${metric || "metric"} over ${unit}`, xName: unit, zero: false,
        marks: resizes.map(([time, kind, from, to]) => [samplesAt(time), `${kind}: ${from} → ${to} workers`]).filter(([at]) => at !== null),
        lines: [{ name: metric, points: told.map((p) => [p[SAMPLES], p[METRICS][metric]]) }] }),
      chart({ title: "Samples/s and workers", xName: "since the page saw it first", xText: since, pace: niceTime, marks, lines: [
        overTime("samples/s", RATE), overTime("workers", WORKERS, { right: true, whole: true })] }),
      splitBars("Pauses", detail.pauses.slice(-8).map(([time, kind, , parts]) => [`${clock(time, this.store.simulated)} ${kind}`, Object.entries(parts)]), (v) => `${number(v)} s`),
      shares.length ? splitBars("Where its time went", [["since its submission", shares]], span) : null,
    ].filter(Boolean);
  }

  workers(detail) {
    if (!detail.workers.length) return null;
    const nodes = this.store.tables.nodes;
    const look = (rank, what) => h("button", { type: "button", onclick: () => this.look(rank, what) }, what);
    return h("div", { class: "cards" }, h("h3", {}, "Workers"), table(["Rank", "Node", "GPU", "GPU memory", "Process", "Generation", "Heard of", "Step time / median", "Look"],
      detail.workers.map(([rank, node, pid, generation, silent, slow, used, reserved]) => [String(rank), nodes.get(node)?.label ?? node.slice(0, 8),
        nodes.get(node)?.type ?? "", used === null ? "–" : `${bytes(used)} of ${bytes(reserved)} reserved`, String(pid), String(generation),
        silent === null ? "–" : warned(silent > QUIET_S, `${number(silent)} s ago`), slow === null ? "–" : warned(slow > SLOW, `${number(slow)} x`),
        this.store.source.kind === "live" ? h("span", { class: "looks" }, look(rank, "logs"), look(rank, "stack")) : ""])), this.printed());
  }

  printed() {
    return this.texts.size ? h("div", { class: "printed" }, [...this.texts].map(([what, text]) => h("pre", { id: `printed-${what}`, tabindex: "0" }, text))) : null;
  }

  // What a worker has printed last, or where its threads are.
  async look(rank, what) {
    const job = this.job;
    const say = (text) => {
      if (job !== this.job) return;
      this.texts.set(what, `${what} of rank ${rank}${text}`);
      this.draw();
      const box = $("printed-logs"); // none where the job has ended meanwhile
      if (box && what === "logs") box.scrollTop = box.scrollHeight;
    };
    document.activeElement?.blur();
    say(": asking its node...");
    try {
      const path = `api/jobs/${encodeURIComponent(job)}/workers/${rank}/${what}`;
      say(`\n${(await (await this.store.ask(path)).json()).text}`);
    } catch (error) {
      say(`: ${error.message}`);
    }
  }

  events(detail) {
    return h("div", {}, h("h3", {}, "Events"), detail.events.length ? table(["When", "What", "Workers", "Reason"],
      detail.events.slice(-60).reverse().map(([time, kind, from, to, reason]) =>
        [clock(time, this.store.simulated), kind.replaceAll("_", " "), from === to ? String(to) : `${from} → ${to}`, reason])) : h("p", { class: "soft" }, "none yet"));
  }

  actions(row) {
    const input = h("input", { type: "number", min: row.min_workers ?? 1, max: row.max_workers ?? 1, value: row.held_at ?? row.target, "aria-label": "workers" });
    const button = (text, act) => h("button", { type: "button", onclick: act }, text);
    return h("div", { class: "tools", id: "actions" }, input,
      button("Hold at this size", () => this.act("resize", { workers: Number(input.value) })),
      button("Release", () => this.act("release", {})),
      row.phase === "paused" ? button("Resume", () => this.act("resume", {})) : button("Pause", () => this.act("pause", {})),
      button("Stop", () => { if (window.confirm(`Stop job ${row.job}?`)) this.act("stop", {}); }));
  }

  async act(action, body) {
    const job = this.job;
    try {
      const path = `api/jobs/${encodeURIComponent(job)}/${action}`;
      const answer = await this.store.ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
      this.said = `${action}: ${(await answer.json()).done}`;
    } catch (error) {
      this.said = `${action}: ${error.message}`;
    }
    document.activeElement?.blur();
    if (job === this.job) this.load();
  }
}

function warned(doubtful, text) {
  return doubtful ? h("span", { class: "warn" }, text) : text;
}

// Training time over all time, where the job does not tell it itself.
function productive(detail) {
  if (!detail) return null;
  const parts = Object.entries(detail.shares);
  const all = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  return all > 0 && detail.shares.training !== undefined ? detail.shares.training / all : null;
}
