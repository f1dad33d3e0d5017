// The allocation over time on a canvas: a row for each node, a lane for each slot, a colour for each job.

import { $, clock, h, niceTime, span } from "./dom.js";
import { lanes } from "./lanes.js";

const LEFT = 130;
const RIGHT = 44;
const AXIS = 20;
const MARK = 14; // the lane of marks, above all rows
export const MARKS = {
  resize: ["▲", "ink"], kill: ["✕", "bad"], preempted: ["■", "warn"], paused: ["‖", "ink"], "out of memory": ["!", "bad"], checkpoint: ["•", "soft"],
  drain: ["▼", "warn"], "spot notice": ["$", "warn"], gone: ["✕", "bad"], straggler: ["~", "warn"], "not finite": ["?", "bad"],
};

export class Timeline {
  constructor(store, choose) {
    this.store = store;
    this.choose = choose;
    this.canvas = $("bars");
    this.below = $("use");
    this.range = null; // [from, to]; null for all
    this.span = 0;
    this.drag = null;
    this.rows = [];
    this.placed = new Map();
    this.listen();
    $("legend").replaceChildren(...Object.entries(MARKS).slice(0, 8).map(([name, [sign]]) => h("span", {}, `${sign} ${name}`)));
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointerdown", (e) => { if (e.offsetX > LEFT) { this.drag = [e.offsetX, e.offsetX]; canvas.setPointerCapture(e.pointerId); } });
    canvas.addEventListener("pointermove", (e) => this.move(e));
    canvas.addEventListener("pointerup", (e) => this.release(e));
    canvas.addEventListener("pointercancel", () => { this.drag = null; this.draw(); });
    canvas.addEventListener("dblclick", () => this.zoom(null));
    canvas.addEventListener("keydown", (e) => this.key(e));
    for (const button of document.querySelectorAll("[data-span]")) {
      button.addEventListener("click", () => { this.range = null; this.span = Number(button.dataset.span); this.draw(); });
    }
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  // Bars, nodes or time have changed.
  update(changed) {
    if (changed === undefined || changed.has("bars") || changed.has("nodes") || !this.rows.length) {
      const nodes = this.store.tables.nodes;
      const bars = this.store.rows("bars");
      const used = new Set(bars.map((bar) => bar[1]));
      this.rows = this.store.rows("nodes").filter((node) => node.gone_s === null || used.has(node.node));
      for (const id of used) if (!nodes.has(id)) this.rows.push({ node: id, label: id.slice(0, 8), slots: 1, gone_s: 0 });
      this.placed = lanes(bars, nodes, Infinity);
    }
    this.draw();
  }

  get extent() {
    if (this.range) return this.range;
    const now = this.store.now_s;
    let first = Infinity;
    let last = this.store.source.kind === "live" ? now : -Infinity;
    for (const own of this.placed.values()) for (const each of own) {
      first = Math.min(first, each.from);
      if (Number.isFinite(each.to)) last = Math.max(last, each.to);
    }
    for (const use of this.store.tables.use.values()) { first = Math.min(first, use[0]); last = Math.max(last, use[0]); }
    if (!Number.isFinite(last)) last = now;
    if (!Number.isFinite(first)) first = last - 60;
    if (this.span) first = Math.max(first, last - this.span);
    return [first, Math.max(last, first + 10)];
  }

  get lane() {
    const most = this.rows.reduce((sum, row) => sum + row.slots, 0) || 1;
    return Math.max(3, Math.min(16, 360 / most));
  }

  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.paint(); });
  }

  paint() {
    const lane = this.lane;
    const gap = 5;
    let y = MARK + 2;
    this.tops = this.rows.map((row) => { const top = y; y += Math.max(row.slots * lane, 12) + gap; return top; });
    const height = Math.max(y, 40) + AXIS;
    const view = this.begin(this.canvas, height);
    if (!view) return;
    this.paintRows(view, lane, height - AXIS);
    this.paintBars(view, lane);
    this.paintMarks(view);
    this.paintAxis(view, height - AXIS);
    if (this.drag) {
      view.g.fillStyle = view.colours.accent;
      view.g.globalAlpha = 0.2;
      view.g.fillRect(Math.min(...this.drag), 0, Math.abs(this.drag[1] - this.drag[0]), height);
      view.g.globalAlpha = 1;
    }
    this.paintUse();
  }

  begin(canvas, height) {
    const width = canvas.parentElement.clientWidth;
    if (!width) return null;
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
    }
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, width, height);
    g.font = "11px system-ui, sans-serif";
    const style = getComputedStyle(document.documentElement);
    const colours = Object.fromEntries(["ink", "soft", "grid", "line", "spot", "accent", "bad", "warn", "good", "back"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    const [from, to] = this.extent;
    const left = width < 600 ? 72 : LEFT;
    const x = (time) => left + ((Math.min(time, to) - from) / (to - from)) * (width - left - RIGHT);
    return { g, width, height, colours, from, to, x, left };
  }

  paintRows(view, lane, bottom) {
    const { g, colours } = view;
    this.rows.forEach((row, i) => {
      const high = Math.max(row.slots * lane, 12);
      g.fillStyle = row.spot ? colours.spot : colours.grid;
      // A node is shaded while it was there.
      const begin = Math.max(view.x(row.since_s ?? view.from), view.left);
      g.fillRect(begin, this.tops[i], Math.max(view.x(row.gone_s ?? view.to) - begin, 0), high);
      g.fillStyle = row.gone_s === null ? colours.ink : colours.soft;
      g.textBaseline = "middle";
      const type = row.type ? ` ${row.type}` : "";
      const text = `${row.label}${type}${row.spot ? " spot" : ""}${row.draining ? " ▼" : ""}${row.failures ? " !" : ""}`;
      g.fillText(text, 4, this.tops[i] + high / 2, view.left - 8);
    });
    g.strokeStyle = colours.line;
    g.strokeRect(view.left + 0.5, 0.5, view.width - view.left - RIGHT, bottom - 1);
  }

  paintBars(view, lane) {
    const { g, x } = view;
    const jobs = this.store.tables.jobs;
    this.rows.forEach((row, i) => {
      const own = this.placed.get(row.node) ?? [];
      for (const { bar, from, to, pieces } of own) {
        if (to < view.from || from > view.to) continue;
        const x0 = Math.max(x(from), view.left);
        const wide = Math.max(x(to) - x0, 0.8);
        g.fillStyle = jobs.get(bar[2])?.colour ?? "#808080";
        for (const [first, count] of pieces) {
          const y = this.tops[i] + first * lane;
          const high = Math.max(count * lane, row.slots === 1 ? 12 : 0) - (lane > 5 ? 1 : 0);
          g.fillRect(x0, y, wide > 2 ? wide - 0.6 : wide, high);
          if (high >= 11 && wide > 34) this.name(g, bar[2], x0, y, wide, high);
        }
      }
    });
  }

  name(g, job, x0, y, wide, high) {
    const most = Math.floor((wide - 6) / 6);
    const text = job.length <= most ? job : `${job.slice(0, Math.max(most - 1, 1))}…`;
    const back = g.fillStyle;
    g.fillStyle = light(back) ? "#111" : "#fff";
    g.textBaseline = "middle";
    g.fillText(text, x0 + 3, y + high / 2, wide - 6);
    g.fillStyle = back;
  }

  // What happened to jobs and nodes, on a lane of its own.
  paintMarks(view) {
    const { g, colours, x } = view;
    g.textBaseline = "middle";
    g.textAlign = "center";
    this.marked = [];
    for (const mark of this.store.tables.marks.values()) {
      const [, time, , kind] = mark;
      if (time < view.from || time > view.to) continue;
      const [sign, colour] = MARKS[kind] ?? ["·", "soft"];
      const y = MARK / 2 + 1;
      g.lineWidth = 3;
      g.strokeStyle = colours.back;
      g.strokeText(sign, x(time), y);
      g.fillStyle = colours[colour];
      g.fillText(sign, x(time), y);
      this.marked.push([x(time), y, mark]);
    }
    g.textAlign = "left";
    g.lineWidth = 1;
  }

  paintAxis(view, y) {
    const { g, colours, x, from, to } = view;
    const step = niceTime((to - from) / Math.max(2, (view.width - view.left) / 110));
    g.fillStyle = colours.soft;
    g.strokeStyle = colours.line;
    g.textBaseline = "top";
    const first = Math.ceil(from / step) * step;
    for (let i = 0; i <= Math.min((to - first) / step, 200); i += 1) {
      const t = first + i * step;
      g.beginPath();
      g.moveTo(x(t), y);
      g.lineTo(x(t), y + 4);
      g.stroke();
      const text = clock(t, this.store.simulated);
      if (x(t) + 2 + Math.min(g.measureText(text).width, 100) <= view.width) g.fillText(text, x(t) + 2, y + 4, 100);
    }
  }

  paintUse() {
    const view = this.begin(this.below, 74);
    if (!view) return;
    const { g, colours, x } = view;
    const uses = this.store.rows("use");
    const all = Math.max(1, this.rows.reduce((sum, row) => sum + (row.gone_s === null ? row.slots : 0), 0), ...uses.map((u) => u[1]));
    const most = Math.max(1, ...uses.map((u) => u[2]));
    const dear = Math.max(0, ...uses.map((u) => u[3] ?? 0));
    const y = (part) => 68 - 58 * part;
    const steps = (value, paint) => uses.forEach((use, i) => {
      const until = uses[i + 1]?.[0] ?? view.to;
      if (until >= view.from && use[0] <= view.to && value(use) !== null) paint(Math.max(x(use[0]), view.left), Math.max(x(until), view.left), value(use));
    });
    g.fillStyle = colours.line;
    steps((u) => u[1] / all, (x0, x1, part) => g.fillRect(x0, y(part), Math.max(x1 - x0, 0.5), 68 - y(part)));
    line(g, colours.bad, steps, (u) => (u[2] === null ? null : u[2] / most), y);
    if (dear) line(g, colours.good, steps, (u) => (u[3] === null ? null : u[3] / dear), y);
    g.fillStyle = colours.soft;
    g.textBaseline = "top";
    g.fillText(`slots in use, of ${all}`, 4, 8, view.left - 8);
    g.fillStyle = colours.bad;
    if (uses.some((u) => u[2] !== null)) g.fillText(`jobs waiting, to ${most}`, 4, 26, view.left - 8);
    g.fillStyle = colours.good;
    if (dear) g.fillText(`USD/h, to ${dear}`, 4, 44, view.left - 8);
  }

  hit(e) {
    const found = (this.marked ?? []).find(([mx, my]) => Math.abs(mx - e.offsetX) < 6 && Math.abs(my - e.offsetY) < 8);
    if (found) return { mark: found[2] };
    const [from, to] = this.extent;
    const width = this.canvas.parentElement.clientWidth;
    const left = width < 600 ? 72 : LEFT;
    const time = from + ((e.offsetX - left) / (width - left - RIGHT)) * (to - from);
    const lane = this.lane;
    const slack = (2 * (to - from)) / width;
    for (let i = 0; i < this.rows.length; i += 1) {
      const inside = (e.offsetY - this.tops[i]) / lane;
      const row = this.rows[i];
      if (inside < 0 || inside >= Math.max(row.slots, 12 / lane)) continue;
      const own = (this.placed.get(row.node) ?? []).filter((each) => each.from - slack <= time && each.to + slack >= time);
      return { node: row, bar: own.find((each) => row.slots === 1 || each.pieces.some(([f, n]) => inside >= f && inside < f + n)) };
    }
    return {};
  }

  move(e) {
    if (this.drag) {
      this.drag[1] = e.offsetX;
      this.draw();
      return;
    }
    this.tell(this.hit(e));
  }

  tell({ mark, node, bar }) {
    const at = (time) => clock(time, this.store.simulated);
    let text = "";
    if (mark) text = `${at(mark[1])} ${mark[2] ? `job ${mark[2]}: ` : ""}${mark[3]}: ${mark[4]}`;
    else if (bar) {
      const [, , job, from, to, slots, decision] = bar.bar;
      const reason = this.store.tables.decisions.get(decision)?.reason ?? (to === null ? this.store.tables.jobs.get(job)?.why : "") ?? "";
      const until = to === null ? `${span(this.store.now_s - from)} so far` : span(to - from);
      text = `${job}: ${slots} ${slots === 1 ? "slot" : "slots"} on ${node.label} since ${at(from)}, ${until}. ${reason}`;
    } else if (node) text = `${node.label}: ${node.used ?? 0} of ${node.slots} slots in use${node.spot ? ", spot" : ""}${node.draining ? ", about to go" : ""}${node.failures ? `. ${node.failures}` : ""}`;
    $("reason").textContent = text;
    this.canvas.style.cursor = bar || mark ? "pointer" : "crosshair";
  }

  release(e) {
    const drag = this.drag;
    this.drag = null;
    if (drag && Math.abs(drag[1] - drag[0]) > 5) {
      const [from, to] = this.extent;
      const width = this.canvas.parentElement.clientWidth;
      const left = width < 600 ? 72 : LEFT;
      const time = (px) => from + ((px - left) / (width - left - RIGHT)) * (to - from);
      this.zoom([Math.max(time(Math.min(...drag)), from), Math.min(time(Math.max(...drag)), to)]);
      return;
    }
    this.draw();
    const { bar, mark } = this.hit(e);
    if (bar || mark?.[2]) this.choose(bar ? bar.bar[2] : mark[2]);
  }

  zoom(range) {
    this.range = range && range[1] - range[0] > 0.5 ? range : null;
    if (!this.range) this.span = 0;
    this.draw();
  }

  key(e) {
    const [from, to] = this.extent;
    const wide = to - from;
    const next = {
      ArrowLeft: [from - wide / 5, to - wide / 5], ArrowRight: [from + wide / 5, to + wide / 5],
      "+": [from + wide / 4, to - wide / 4], "-": [from - wide / 2, to + wide / 2], Escape: null, 0: null,
    }[e.key];
    if (next === undefined) return;
    e.preventDefault();
    this.zoom(next);
  }
}

function line(g, colour, steps, value, y) {
  g.strokeStyle = colour;
  g.lineWidth = 1.5;
  g.beginPath();
  let begun = false;
  steps(value, (x0, x1, part) => {
    if (begun) g.lineTo(x0, y(part));
    else g.moveTo(x0, y(part));
    g.lineTo(x1, y(part));
    begun = true;
  });
  g.stroke();
  g.lineWidth = 1;
}

function light(colour) {
  const n = parseInt(colour.slice(1), 16);
  return 0.299 * (n >> 16) + 0.587 * ((n >> 8) & 255) + 0.114 * (n & 255) > 140;
}
