// The table of jobs: only the rows in view are elements, so that thousands cost nothing.

import { $, bar, h, metricOf, number, percent, span } from "./dom.js";

const ROW = 26;
const COLUMNS = [
  ["job", "Job", "minmax(140px, 1.3fr)", (j) => [h("i", { class: "swatch", style: { background: j.colour } }), j.job], (j) => j.job],
  ["phase", "Phase", "80px", (j) => h("span", { class: { failed: "bad", waiting: "warn", paused: "warn", silent: "warn" }[j.phase] }, j.phase), (j) => j.phase],
  ["workers", "Workers", "108px", workers, (j) => j.workers],
  ["batch", "Batch", "68px", (j) => (j.batch ? number(j.batch) : ""), (j) => j.batch],
  ["rate", "Samples/s", "80px", (j) => (j.samples_per_s ? number(j.samples_per_s) : ""), (j) => j.samples_per_s],
  ["efficiency", "Eff.", "56px", (j) => (j.efficiency === null ? "" : percent(j.efficiency)), (j) => j.efficiency],
  ["progress", "Progress", "112px", (j) => (j.progress === null ? (j.step ? `step ${j.step}` : "") : bar(j.progress, percent(j.progress))), (j) => j.progress],
  ["metric", "Metric", "96px", metric, (j, store) => metricOf(j, store.metric)[1]],
  ["eta", "ETA", "70px", (j) => (j.eta_s === null ? "" : span(j.eta_s)), (j) => j.eta_s],
  ["why", "Why", "minmax(220px, 3fr)", why, (j) => j.why],
  ["slack", "Slack", "92px", slack, (j) => j.deadline_s ?? j.budget_usd],
  ["tenant", "Tenant", "80px", (j) => j.tenant, (j) => j.tenant],
  ["priority", "Prio", "46px", (j) => (j.priority ? String(j.priority) : ""), (j) => j.priority],
  ["cost", "USD", "60px", (j) => (j.cost_usd === null ? "" : number(j.cost_usd)), (j) => j.cost_usd],
];
const NUMBERS = new Set(["batch", "rate", "efficiency", "metric", "eta", "slack", "priority", "cost"]);
const OPTIONAL = new Set(["metric", "slack", "tenant", "priority", "cost"]); // columns that are left out while nothing stands in them
const MEASURED = 200; // rows that the columns' widths are of

// The reason once, also where the allocator's note is the same as the job's.
function why(j) {
  if (!j.note || j.why.includes(j.note)) return j.why;
  return j.note.includes(j.why) ? j.note : `${j.note}; ${j.why}`;
}

// A metric that was chosen stands alone, a job's own with its name.
function metric(j, now_s, store) {
  const [name, value] = metricOf(j, store.metric);
  return value === null ? "" : store.metric ? number(value) : `${name} ${number(value)}`;
}

function workers(j) {
  const limits = j.min_workers === null ? "" : ` (${j.min_workers}:${j.max_workers})`;
  const change = j.workers === j.target ? `${j.workers}` : `${j.workers} → ${j.target}`;
  return `${change}${limits}${j.held_at === null ? "" : " held"}`;
}

// What is left of a deadline after the ETA, or of a budget.
function slack(j, now_s) {
  if (j.deadline_s !== null) {
    const left = j.deadline_s - now_s - (j.eta_s ?? 0);
    return h("span", { class: left < 0 ? "bad" : null, title: "time left of the deadline after the ETA" }, span(left));
  }
  if (j.budget_usd === null) return "";
  const left = j.budget_usd - (j.cost_usd ?? 0);
  return h("span", { class: left < 0 ? "bad" : null, title: "left of the budget" }, `${number(left)} USD`);
}

export class Jobs {
  constructor(store, choose) {
    this.store = store;
    this.choose = choose;
    this.sort = ["", 1]; // as they came: those that run before those that have ended
    this.chosen = "";
    this.shown = [];
    this.widths = COLUMNS.map(([name, title]) => (OPTIONAL.has(name) ? 0 : title.length));
    this.heads = COLUMNS.map(([, title], place) => h("span", { role: "columnheader" },
      h("button", { type: "button", onclick: () => this.order(place) }, title)));
    this.body = h("div", { class: "body", role: "rowgroup" });
    this.head = h("div", { class: "head", role: "row" });
    this.grid = h("div", { class: "grid", role: "grid", tabindex: "0", "aria-label": "Jobs" }, this.head, this.body);
    $("table").replaceChildren(this.grid);
    this.grid.addEventListener("scroll", () => this.draw());
    this.grid.addEventListener("keydown", (event) => this.key(event));
    this.body.addEventListener("click", (event) => this.click(event));
    $("find").addEventListener("input", () => this.update());
    $("ended").addEventListener("change", () => this.update());
  }

  order(place) {
    const same = this.sort[0] === place;
    this.sort = same && this.sort[1] === -1 ? ["", 1] : [place, same ? -1 : 1];
    this.update();
  }

  update() {
    const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = this.store.rows("jobs");
    const ended = $("ended").checked;
    this.shown = all.filter((j) => (ended || j.ended_s === null) && matches(j, words));
    const [place, sign] = this.sort;
    const value = place === "" ? (j) => (j.ended_s === null ? 0 : 1) : COLUMNS[place][4];
    this.shown.sort((a, b) => sign * compare(value(a, this.store), value(b, this.store)));
    const text = this.shown.length === all.length ? `${all.length}` : `${this.shown.length} of ${all.length}`;
    $("count").textContent = `${text} ${all.length === 1 ? "job" : "jobs"}`;
    this.body.style.height = `${Math.max(1, this.shown.length) * ROW}px`;
    this.measure();
    this.draw();
  }

  // Columns are as wide as the longest text that they have had: none is cut, and none jumps.
  measure() {
    const now_s = this.store.now_s;
    for (const j of this.shown.slice(0, MEASURED)) {
      COLUMNS.forEach(([, , , cell], place) => {
        const inside = cell(j, now_s, this.store);
        const length = typeof inside === "string" ? inside.length : h("span", {}, inside).textContent.length + (place === 0 ? 2 : 0);
        this.widths[place] = Math.max(this.widths[place], length);
      });
    }
    const bars = COLUMNS.findIndex(([name]) => name === "progress");
    const size = (letters, place) => `calc(${Math.min(Math.max(letters, COLUMNS[place][1].length), 44) + 1}ch + ${place === bars ? 72 : 14}px)`;
    const room = (name, text) => (name === "why" ? "220px" : text); // and what is left
    const wide = COLUMNS.map(([name], place) => room(name, size(this.widths[place], place))).filter((_, place) => this.widths[place]);
    this.head.replaceChildren(...this.heads.filter((_, place) => this.widths[place]));
    this.columns = wide.map((each) => (each === "220px" ? "minmax(220px, 1fr)" : each)).join(" ");
    this.head.style.gridTemplateColumns = this.columns;
    const least = `calc(${wide.join(" + ")})`;
    this.head.style.minWidth = this.body.style.minWidth = least;
  }

  draw() {
    const first = Math.max(0, Math.floor((this.grid.scrollTop - ROW) / ROW) - 4);
    const rows = Math.ceil((this.grid.clientHeight || 600) / ROW) + 8;
    const now_s = this.store.now_s;
    this.body.replaceChildren(...(this.shown.length
      ? this.shown.slice(first, first + rows).map((j, i) => this.row(j, first + i, now_s))
      : [h("p", { class: "soft" }, this.store.tables.jobs.size ? "no job matches" : "no jobs yet")]));
  }

  row(j, place, now_s) {
    return h("div", {
      role: "row", "data-job": j.job, "aria-selected": String(j.job === this.chosen), "aria-rowindex": place + 2,
      style: { top: `${place * ROW}px`, height: `${ROW}px`, gridTemplateColumns: this.columns, opacity: j.ended_s === null ? "" : ".65" },
    }, COLUMNS.filter((_, at) => this.widths[at]).map(([name, , , cell]) => {
      const inside = cell(j, now_s, this.store);
      const title = name === "why" || name === "job" ? (name === "job" ? j.job : inside) : null;
      return h("span", { role: "gridcell", class: NUMBERS.has(name) ? "number" : null, title, "data-column": name }, inside);
    }));
  }

  click(event) {
    const row = event.target.closest("[data-job]");
    if (row) this.pick(row.dataset.job);
  }

  pick(job) {
    this.chosen = job;
    this.draw();
    this.choose(job);
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15 }[event.key];
    if (!step || !this.shown.length || event.target !== this.grid) return;
    event.preventDefault();
    const at = this.shown.findIndex((j) => j.job === this.chosen);
    const next = Math.max(0, Math.min(this.shown.length - 1, at < 0 ? 0 : at + step));
    const top = next * ROW;
    if (top < this.grid.scrollTop) this.grid.scrollTop = top;
    if (top + 3 * ROW > this.grid.scrollTop + this.grid.clientHeight) this.grid.scrollTop = top + 3 * ROW - this.grid.clientHeight;
    this.pick(this.shown[next].job);
  }
}

function matches(j, words) {
  if (!words.length) return true;
  const text = `${j.job} ${j.tenant} ${j.phase} ${j.sweep} ${j.why} ${j.note}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return a < b ? -1 : 1;
}
