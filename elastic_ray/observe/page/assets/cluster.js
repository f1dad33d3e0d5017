// Tenants, nodes wanted, what-if, sweeps.

import { $, bar, h, number, percent, plural, span, svg, table } from "./dom.js";

export function drawTenants(store) {
  const rows = store.rows("tenants");
  $("tenants").hidden = !rows.length && store.source.kind !== "live";
  const quota = (row) => Object.entries(row.quota).map(([name, amount]) => `${number(amount)} ${name}`).join(", ");
  $("tenant-rows").replaceChildren(rows.length
    ? table(["Tenant", "Weight", "Owed", "Used", "Lent to others", "Borrowed", "Quota", "Jobs", "Waiting", "Fairness"], rows.map((row) => [
      row.tenant || "(none)", number(row.weight), bar(row.owed, percent(row.owed)), bar(row.used, percent(row.used)), percent(row.lent),
      percent(row.borrowed), quota(row), String(row.jobs), String(row.waiting), row.fairness === null ? "–" : number(row.fairness)]))
    : h("p", { class: "soft" }, "All jobs are one tenant's: SchedulingConfig(tenant=...) names others."));
}

export function drawWanted(store) {
  const rows = store.rows("wanted");
  $("wanted").hidden = store.source.kind !== "live";
  $("wanted-rows").replaceChildren(rows.length
    ? table(["Type", "Market", "Wanted", "Missing", "For", "Jobs", "Why, or what was refused"], rows.map((row) => [row.type, row.market, String(row.wanted),
      row.missing ? h("span", { class: "warn" }, String(row.missing)) : "0", row.since_s === null ? "" : span(store.now_s - row.since_s), row.jobs.join(", "), row.reason]))
    : h("p", { class: "soft" }, "The allocator decides nothing about nodes: AllocatorConfig(autoscaling=...) lets it."));
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
  const shown = [...trials].sort((a, b) => passed(b) - passed(a) || b.reports - a.reports || (a.loss ?? Infinity) - (b.loss ?? Infinity)).slice(0, MOST_TRIALS);
  const now = store.now_s;
  const first = Math.min(now, ...times.map((b) => b[3]));
  const last = Math.max(first + 1, ...times.map((b) => b[4] ?? now));
  const x = (time) => 230 + ((time - first) / (last - first)) * (WIDTH - 370);
  const lines = [];
  let y = 0;
  let rung = null;
  for (const trial of shown) {
    if (trial.rungs.length && passed(trial) !== rung) {
      rung = passed(trial);
      lines.push(...rungLine(rung, trials, y + HIGH / 2));
      y += HIGH;
    }
    lines.push(...trialLine(trial, byJob.get(trial.job), y + HIGH / 2, { x, now, most }));
    y += HIGH;
  }
  const running = trials.filter((t) => t.ended_s === null).length;
  const left = trials.length - shown.length;
  return h("div", { class: "chart", "data-sweep": name }, h("h3", {}, `${name}: ${plural(trials.length, "trial")}, ${running} running; the width of a line is its workers`),
    h("div", { class: "scroll" }, svg("svg", { viewBox: `0 0 ${WIDTH} ${y + 8}`, role: "img", "aria-label": `Trials of ${name} over time`, style: { minWidth: "640px" } }, lines)),
    left ? h("p", { class: "soft" }, `and ${plural(left, "more trial")} that have come less far`) : null);
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

function trialLine(trial, bars, y, { x, now, most }) {
  const short = trial.job.length > 34 ? `…${trial.job.slice(-33)}` : trial.job;
  const far = trial.rungs.length ? `${trial.reports} of ${trial.rungs.at(-1)} reports` : `epoch ${trial.epoch}`;
  const loss = trial.loss === null ? "" : `, loss ${number(trial.loss)}`;
  // One trial may have workers on several nodes at a time: their lines lie beneath each other.
  const parts = bars.map((bar) => svg("rect", { x: x(bar[3]), y: y - (bar[5] / most) * (HIGH / 2 - 1), width: Math.max(x(bar[4] ?? now) - x(bar[3]), 1),
    height: (bar[5] / most) * (HIGH - 2), fill: trial.colour }, svg("title", {}, `${trial.job}: ${plural(bar[5], "slot")}`)));
  return [svg("text", { x: 4, y: y + 4 }, short), ...parts,
    svg("text", { x: WIDTH - 134, y: y + 4 }, `${far}${loss}`)];
}
