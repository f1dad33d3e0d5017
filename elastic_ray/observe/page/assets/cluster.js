// Tenants, nodes wanted, what-if, sweeps, and metrics of several jobs.

import { $, bar, h, metricOf, number, percent, plural, span, svg, table } from "./dom.js";
import { chart } from "./charts.js";
import { METRICS, SAMPLES } from "./job.js";

export function drawTenants(store) {
  const rows = store.rows("tenants");
  $("tenants").hidden = !rows.length;
  const quota = (row) => Object.entries(row.quota).map(([name, amount]) => `${number(amount)} ${name}`).join(", ");
  $("tenant-rows").replaceChildren(table(["Tenant", "Weight", "Owed", "Used", "Lent to others", "Borrowed", "Quota", "Jobs", "Waiting", "Fairness"], rows.map((row) => [
      row.tenant || "(none)", number(row.weight), bar(row.owed, percent(row.owed)), bar(row.used, percent(row.used)), percent(row.lent),
      percent(row.borrowed), quota(row), String(row.jobs), String(row.waiting), row.fairness === null ? "–" : number(row.fairness)])));
}

export function drawWanted(store) {
  const rows = store.rows("wanted");
  $("wanted").hidden = !rows.length;
  $("wanted-rows").replaceChildren(table(["Type", "Market", "Wanted", "Missing", "For", "Jobs", "Why, or what was refused"], rows.map((row) => [row.type, row.market, String(row.wanted),
      row.missing ? h("span", { class: "warn" }, String(row.missing)) : "0", row.since_s === null ? "" : span(store.now_s - row.since_s), row.jobs.join(", "), h("span", { title: row.figures || null }, row.reason)])));
}

export class WhatIf {
  constructor(store) {
    this.store = store;
    this.nodes = h("input", { id: "what-nodes", placeholder: "T4:4x8, or cpu:2x8" });
    this.policy = h("input", { id: "what-policy", placeholder: "the cluster's own" });
    this.answer = h("div", { id: "what-answer", role: "status" });
    $("question").replaceChildren(h("form", { class: "tools", onsubmit: (event) => { event.preventDefault(); this.ask(); } },
      h("label", {}, "Nodes ", this.nodes), h("label", {}, "Policy ", this.policy), h("button", {}, "Ask the simulator"),
      h("span", { class: "hint" }, "Type, nodes x devices each; empty for the present nodes. By the jobs' own models and declared lengths.")), this.answer);
  }

  async ask() {
    this.answer.replaceChildren(h("p", { class: "soft" }, "working it out..."));
    const query = new URLSearchParams({ nodes: this.nodes.value.trim(), policy: this.policy.value.trim() });
    try {
      const { now, then } = await (await this.store.ask(`api/what-if?${query}`)).json();
      this.answer.replaceChildren(table(["Job", "Workers", "Samples/s", "Ends in", "Moves by", "Reason"], now.map((here, i) => row(here, then[i]))));
    } catch (error) {
      this.answer.replaceChildren(h("p", { class: "bad" }, error.message));
    }
  }
}

function row(here, there) {
  const known = here.ends_s !== null && there.ends_s !== null;
  const moves = known ? there.ends_s - here.ends_s : null;
  const ends = (value) => (value === null ? "?" : span(value));
  return [here.job, `${here.workers} → ${there.workers}`, `${number(here.goodput)} → ${number(there.goodput)}`, `${ends(here.ends_s)} → ${ends(there.ends_s)}`,
    moves === null ? "?" : h("span", { class: moves > 1 ? "bad" : moves < -1 ? "good" : null }, `${moves > 0 ? "+" : ""}${span(moves)}`), there.reason];
}

const WIDTH = 900;
const HIGH = 18;
const MOST_TRIALS = 100;

// A line for each trial over time, as wide as its workers; those that have come to the same rung stand together.
export function drawSweeps(store) {
  const sweeps = new Map();
  for (const job of store.tables.jobs.values()) {
    if (!job.sweep) continue;
    if (!sweeps.has(job.sweep)) sweeps.set(job.sweep, []);
    sweeps.get(job.sweep).push(job);
  }
  $("sweeps").hidden = !sweeps.size;
  $("sweep-rows").replaceChildren(...[...sweeps].map(([name, trials]) => sweep(store, name, trials)));
}

function sweep(store, name, trials) {
  const byJob = new Map(trials.map((t) => [t.job, []]));
  for (const each of store.tables.bars.values()) byJob.get(each[2])?.push(each);
  const times = [...byJob.values()].flat();
  const most = Math.max(1, ...trials.map((t) => Math.max(t.workers, t.target)), ...times.map((b) => b[5]));
  const shown = [...trials].sort((a, b) => passed(b) - passed(a) || b.reports - a.reports || (metricOf(a)[1] ?? Infinity) - (metricOf(b)[1] ?? Infinity)).slice(0, MOST_TRIALS);
  const now = store.now_s;
  const first = Math.min(now, ...times.map((b) => b[3]));
  const last = Math.max(first + 1, ...times.map((b) => b[4] ?? now));
  const x = (time) => 230 + ((time - first) / (last - first)) * (WIDTH - 370);
  const called = names(trials);
  const lines = [];
  let y = 0;
  let rung = null;
  for (const trial of shown) {
    if (trial.rungs.length && passed(trial) !== rung) {
      rung = passed(trial);
      lines.push(...rungLine(rung, trials, y + HIGH / 2));
      y += HIGH;
    }
    lines.push(...trialLine(trial, byJob.get(trial.job), y + HIGH / 2, { x, now, most, called }));
    y += HIGH;
  }
  const left = trials.length - shown.length;
  return h("div", { class: "chart", "data-sweep": name }, h("h3", {}, summary(name, trials, called)),
    ranking(trials, called), parallel(name, trials, called), matter(store, name, trials), h("p", { class: "soft" }, "Each trial over time; the width of a line is its workers."),
    h("div", { class: "scroll" }, svg("svg", { viewBox: `0 0 ${WIDTH} ${y + 8}`, role: "img", "aria-label": `Trials of ${name} over time`, style: { minWidth: "640px" } }, lines)),
    left ? h("p", { class: "soft" }, `and ${plural(left, "more trial")} that have come less far`) : null);
}

function differing(trials) {
  const all = [...new Set(trials.flatMap((t) => Object.keys(t.parameters)))];
  return all.filter((name) => new Set(trials.map((t) => JSON.stringify(t.parameters[name]))).size > 1);
}

// Trials are called by the parameters in which they differ.
function names(trials) {
  const differ = differing(trials);
  return new Map(trials.map((t) => [t.job, differ.map((name) => `${name.split("/").at(-1)}=${value(t.parameters[name])}`).join(" ")]));
}

function value(given) {
  if (typeof given !== "number") return String(given ?? "–");
  return given !== 0 && Math.abs(given) < 0.01 ? given.toExponential().replace(/(\.\d\d)\d+/, "$1") : number(given);
}

function best(trials) {
  const sign = (t) => (t.mode === "max" ? -t.score : t.score);
  return trials.filter((t) => t.score !== null).sort((a, b) => sign(a) - sign(b));
}

// One line: how many trials are done, run and were cut, the best and its parameters, and the time left.
function summary(name, trials, called) {
  const running = trials.filter((t) => t.ended_s === null);
  const count = (phase) => trials.filter((t) => t.ended_s !== null && t.phase === phase).length;
  // One that was stopped after the last rung was trained to its end.
  const whole = trials.filter((t) => t.ended_s !== null && t.phase === "stopped" && t.reports >= (t.rungs.at(-1) ?? Infinity)).length;
  const parts = [`${running.length} running`, `${count("finished") + whole} done`, `${count("stopped") - whole} cut`, count("failed") ? `${count("failed")} failed` : ""];
  const [first] = best(trials);
  if (first) parts.push(`best ${first.metric} ${number(first.score)}${called.get(first.job) ? ` at ${called.get(first.job)}` : ""}`);
  const ends = running.map((t) => t.eta_s).filter((eta) => eta !== null);
  if (ends.length) parts.push(`those that run end in ${span(Math.max(...ends))}`);
  return `${name}: ${plural(trials.length, "trial")}, ${parts.filter(Boolean).join(", ")}`;
}

// Trials with their parameters and the metric, best first.
function ranking(trials, called) {
  const ranked = best(trials);
  const rows = [...ranked, ...trials.filter((t) => t.score === null)].slice(0, MOST_TRIALS);
  return table(["Trial", metricOf(rows[0])[0] || "Metric", "Reports", "Phase", "ETA"], rows.map((t) => [
    h("span", { title: t.job }, h("i", { class: "swatch", style: { background: t.colour } }), called.get(t.job) || t.job),
    number(t.score ?? metricOf(t)[1]), String(t.reports), t.phase, t.eta_s === null ? "" : span(t.eta_s)]));
}

// Parallel coordinates: a line for each trial through the parameters in which trials differ, to the metric; best in front.
function parallel(name, trials, called) {
  const ranked = best(trials).slice(0, MOST_TRIALS);
  const names = differing(ranked);
  if (ranked.length < 2 || !names.length) return null;
  const axes = [...names.map((key) => axis(key.split("/").at(-1), ranked.map((t) => t.parameters[key]))), axis(ranked[0].metric, ranked.map((t) => t.score))];
  const x = (i) => 60 + (i * (WIDTH - 120)) / (axes.length - 1);
  const lines = ranked.map((t, i) => svg("path", { d: axes.map((a, k) => `${k ? "L" : "M"}${x(k).toFixed(1)} ${a.y[i].toFixed(1)}`).join(""), fill: "none",
    stroke: t.colour, "stroke-width": i ? 1.5 : 3, opacity: i ? 0.3 + 0.6 * (1 - i / ranked.length) : 1 }, svg("title", {}, `${called.get(t.job) || t.job}: ${number(t.score)}`))).reverse();
  const marks = axes.map((a, k) => svg("g", {}, svg("line", { x1: x(k), x2: x(k), y1: 24, y2: 166, class: "axis" }), svg("text", { x: x(k), y: 12, "text-anchor": "middle" }, a.label),
    a.ticks.map(([y, text]) => svg("text", { x: x(k) + 4, y: y + 4, class: "soft" }, text))));
  return h("div", { class: "scroll", "data-parallel": name }, svg("svg", { viewBox: `0 0 ${WIDTH} 180`, role: "img",
    "aria-label": `Parameters and ${ranked[0].metric} of the trials of ${name}`, style: { minWidth: "640px" } }, lines, marks));
}

// Where values stand on an axis: numbers by size, or by their logarithm where they span decades; others side by side.
function axis(label, values) {
  const high = Math.max(...values);
  const low = Math.min(...values);
  const place = (part) => 166 - 142 * part;
  if (!values.every((v) => typeof v === "number")) {
    const all = [...new Set(values.map((v) => value(v)))].sort();
    const at = (v) => place(all.length > 1 ? all.indexOf(v) / (all.length - 1) : 0.5);
    return { label, y: values.map((v) => at(value(v))), ticks: all.slice(0, 12).map((v) => [at(v), v.slice(0, 14)]) };
  }
  const scale = low > 0 && high / low >= 100 ? Math.log : (v) => v;
  const y = (v) => place(high > low ? (scale(v) - scale(low)) / (scale(high) - scale(low)) : 0.5);
  return { label, y: values.map(y), ticks: [...new Set([low, high])].map((v) => [y(v), value(v)]) };
}

const known = new Map();

// How much each parameter matters: asked anew when another trial has a value.
function matter(store, name, trials) {
  const told = trials.filter((t) => t.score !== null).length;
  const before = known.get(name);
  if (told && before?.told !== told) {
    known.set(name, { told, answer: before?.answer });
    store.ask(`api/sweeps/${encodeURIComponent(name)}`).then((answer) => answer.json()).then((answer) => {
      known.set(name, { told, answer });
      store.wanted.add("jobs");
      store.tell();
    }, () => known.set(name, { told: 0 }));
  }
  const answer = before?.answer;
  if (!answer) return null;
  const rows = Object.entries(answer.importance).map(([key, part]) => [key, bar(part, percent(part))]);
  return h("div", { "data-importance": name }, rows.length ? table(["Parameter", "Importance (Optuna)"], rows) : h("p", { class: "soft" }, `Importance: ${answer.why}`));
}

// The last rung that a trial has come to; 0 before the first.
function passed(trial) {
  return trial.rungs.filter((rung) => rung <= trial.reports).at(-1) ?? 0;
}

function rungLine(rung, trials, y) {
  const here = trials.filter((t) => passed(t) === rung);
  const over = here.filter((t) => t.ended_s !== null).length;
  const text = `${rung ? `rung ${rung}` : "before the first rung"}: ${plural(here.length, "trial")}, ${over} over`;
  return [svg("line", { x1: 0, x2: WIDTH, y1: y + 7, y2: y + 7, class: "grid" }), svg("text", { x: 4, y: y + 4, class: "soft", "data-rung": String(rung) }, text)];
}

function trialLine(trial, bars, y, { x, now, most, called }) {
  const name = called.get(trial.job) || trial.job;
  const short = name.length > 34 ? `…${name.slice(-33)}` : name;
  const far = trial.rungs.length ? `${trial.reports} of ${trial.rungs.at(-1)} reports` : `epoch ${trial.epoch}`;
  const [metric, value] = metricOf(trial);
  const last = value === null ? "" : `, ${metric.split("/").at(-1)} ${number(value)}`;
  // One trial may have workers on several nodes at a time: their lines lie beneath each other.
  const parts = bars.map((bar) => svg("rect", { x: x(bar[3]), y: y - (bar[5] / most) * (HIGH / 2 - 1), width: Math.max(x(bar[4] ?? now) - x(bar[3]), 1),
    height: (bar[5] / most) * (HIGH - 2), fill: trial.colour }, svg("title", {}, `${trial.job}: ${plural(bar[5], "slot")}`)));
  return [svg("text", { x: 4, y: y + 4 }, short), ...parts,
    svg("text", { x: WIDTH - 134, y: y + 4 }, `${far}${last}`)];
}

const COMPARED = 8;
const COMPARE_MS = 5000;

// One metric of several jobs in one chart. Which metric is chosen here is shown of jobs everywhere.
export class Compare {
  constructor(store, changed) {
    this.store = store;
    this.series = new Map();
    this.asked = 0;
    this.metric = h("select", { id: "metric", onchange: () => { store.metric = this.metric.value; changed(); this.load(); } });
    this.jobs = h("select", { id: "compared", multiple: true, size: 6, onchange: () => this.load() });
    this.chart = h("div", { class: "compared" });
    this.open = h("details", { ontoggle: () => this.load() }, h("summary", {}, "Compare jobs"), h("label", {}, `Jobs, up to ${COMPARED} `, this.jobs), this.chart);
    $("metric-rows").replaceChildren(h("div", { class: "tools" }, h("label", {}, "Metric ", this.metric)), this.open);
  }

  update() {
    const jobs = this.store.rows("jobs");
    const names = [...new Set(jobs.flatMap((j) => Object.keys(j.metrics)))].sort();
    $("metrics").hidden = !names.length;
    options(this.metric, [["", "each job's own"], ...names.map((name) => [name, name])]);
    options(this.jobs, jobs.filter((j) => metricOf(j, this.store.metric)[1] !== null).map((j) => [j.job, j.job]));
    if (this.store.source.kind === "live" && Date.now() - this.asked > COMPARE_MS) this.load();
  }

  async load() {
    if (!this.open.open) return;
    this.asked = Date.now();
    const marked = [...this.jobs.selectedOptions].map((option) => option.value);
    const chosen = (marked.length ? marked : [...this.jobs.options].map((option) => option.value)).slice(0, COMPARED);
    await Promise.all(chosen.map(async (job) => {
      try {
        this.series.set(job, (await (await this.store.ask(`api/jobs/${encodeURIComponent(job)}`)).json()).series);
      } catch { this.series.delete(job); }
    }));
    const unit = this.store.source.kind === "files" ? "reports" : "samples";
    const lines = chosen.map((job) => {
      const row = this.store.tables.jobs.get(job);
      const name = row ? metricOf(row, this.store.metric)[0] : this.store.metric;
      const points = (this.series.get(job) ?? []).map((p) => [p[SAMPLES], p[METRICS][name] ?? NaN]);
      return { name: this.store.metric ? job : `${job}: ${name}`, colour: row?.colour, points };
    });
    const drawn = chart({ title: `${this.store.metric || "Metrics"} over ${unit}, by job`, xName: unit, zero: false, lines });
    this.chart.replaceChildren(drawn ?? h("p", { class: "soft" }, "these jobs have not reported it over time yet"));
  }
}

// The options of a list, made anew only where they differ, so that what is chosen stays.
function options(select, wanted) {
  if (JSON.stringify([...select.options].map((each) => [each.value, each.text])) === JSON.stringify(wanted)) return;
  const chosen = new Set([...select.selectedOptions].map((each) => each.value));
  select.replaceChildren(...wanted.map(([value, text]) => h("option", { value, selected: chosen.has(value) }, text)));
}
