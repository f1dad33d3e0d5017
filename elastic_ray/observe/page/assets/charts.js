// Small line charts in SVG.

import { h, number, svg } from "./dom.js";

const WIDTH = 420;
const HEIGHT = 190;
const PAD = { left: 46, right: 46, top: 10, bottom: 30 };
export const INK = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];

// chart({title, xName, xText, lines: [{name, points: [[x, y]], dots, right, dashed}], marks: [[x, text]], from}):
// a line for each series; those that are "right" have their own axis there. Points without a number are left out.
export function chart({ title, xName = "", xText = number, lines, marks = [], zero = true, pace = nice }) {
  const shown = lines.map((line, i) => ({ colour: INK[i % INK.length], ...line, points: line.points.filter(([x, y]) => finite(x) && finite(y)) }))
    .filter((line) => line.points.length);
  if (!shown.length) return null;
  const xs = shown.flatMap((line) => line.points.map(([x]) => x));
  let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  if (x1 <= x0) [x0, x1] = [x0 - 0.5, x1 + 0.5];
  const x = (value) => PAD.left + ((value - x0) / (x1 - x0)) * (WIDTH - PAD.left - PAD.right);
  const sides = [false, true].map((right) => scale(shown.filter((line) => Boolean(line.right) === right), zero));
  const y = (line, value) => {
    const [low, high] = sides[line.right ? 1 : 0];
    return HEIGHT - PAD.bottom - ((value - low) / (high - low)) * (HEIGHT - PAD.top - PAD.bottom);
  };
  const parts = [axes(sides, x0, x1, x, xText, xName, pace)];
  for (const [at, text] of marks) {
    if (at < x0 || at > x1) continue;
    parts.push(svg("line", { x1: x(at), x2: x(at), y1: PAD.top, y2: HEIGHT - PAD.bottom, class: "axis", "stroke-dasharray": "2 3" }, svg("title", {}, text)));
  }
  for (const line of shown) {
    if (!line.dots) {
      const path = line.points.map(([px, py], i) => `${i ? "L" : "M"}${x(px).toFixed(1)} ${y(line, py).toFixed(1)}`).join("");
      parts.push(svg("path", { d: path, fill: "none", stroke: line.colour, "stroke-width": 2, "stroke-dasharray": line.dashed ? "5 4" : null }));
    }
    if (line.dots || line.points.length === 1) {
      for (const [px, py] of line.points) parts.push(svg("circle", { cx: x(px), cy: y(line, py), r: line.size ?? 4, fill: line.colour }, svg("title", {}, `${xText(px)}: ${number(py)}`)));
    }
  }
  const keys = h("div", { class: "keys" }, shown.map((line) => h("span", {}, h("i", { class: "swatch", style: { background: line.colour } }), line.name)));
  return h("div", { class: "chart", "data-chart": title }, h("h3", {}, title),
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${shown.map((line) => line.name).join(", ")}` }, parts), keys);
}

const finite = (value) => typeof value === "number" && Number.isFinite(value);

function scale(lines, zero) {
  const values = lines.flatMap((line) => line.points.map(([, y]) => y));
  if (!values.length) return null;
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (zero && low > 0) low = 0;
  if (high <= low) high = low + (Math.abs(low) || 1);
  const step = Math.max(nice((high - low) / 4), lines.every((line) => line.whole) ? 1 : 0);
  return [Math.floor(low / step) * step, Math.ceil(high / step) * step, step];
}

// A step of an axis of whole things.
export const whole = (least) => Math.max(1, nice(least));

export function nice(least) {
  const size = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((n) => n * size).find((step) => step >= least * 0.999);
}

function axes(sides, x0, x1, x, xText, xName, pace) {
  const bottom = HEIGHT - PAD.bottom;
  const group = svg("g", {}, svg("path", { class: "axis", d: `M${PAD.left} ${PAD.top}V${bottom}H${WIDTH - PAD.right}` }));
  sides.forEach((side, right) => {
    if (!side) return;
    const [low, high, step] = side;
    const steps = Math.min(Math.round((high - low) / step) || 0, 20);
    for (let i = 0; i <= steps; i += 1) {
      const value = low + i * step;
      const at = bottom - ((value - low) / (high - low)) * (bottom - PAD.top);
      group.append(svg("text", { x: right ? WIDTH - PAD.right + 4 : PAD.left - 4, y: at + 4, "text-anchor": right ? "start" : "end" }, number(value)));
    }
  });
  const step = pace((x1 - x0) / 5);
  for (let value = Math.ceil(x0 / step - 1e-9) * step; value <= x1 + 1e-9 * step; value += step) {
    const anchor = x(value) > WIDTH - PAD.right - 12 ? "end" : "middle";
    group.append(svg("text", { x: x(value), y: bottom + 13, "text-anchor": anchor }, xText(value)));
  }
  group.append(svg("text", { x: (PAD.left + WIDTH - PAD.right) / 2, y: HEIGHT - 3, "text-anchor": "middle" }, xName));
  return group;
}

// Rows of bars, each split into parts: [[label, [[part, value]...]]...]; the longest fills the width.
export function splitBars(title, rows, text) {
  if (!rows.length) return null;
  const names = [...new Set(rows.flatMap(([, parts]) => parts.filter(([, value]) => value > 0).map(([name]) => name)))];
  const colour = (name) => PARTS[name] ?? ["#b8a800", "#cc79a7", "#e69f00", "#56b4e9"][names.indexOf(name) % 4];
  const longest = Math.max(...rows.map(([, parts]) => total(parts)), 1e-9);
  return h("div", { class: "chart", "data-chart": title }, h("h3", {}, title),
    rows.map(([label, parts]) => h("div", {}, h("span", { class: "soft" }, `${label}: ${text(total(parts))}`),
      h("div", { class: "stack", style: { width: `${(100 * total(parts)) / longest}%` } }, parts.map(([name, value]) =>
        h("i", { title: `${name} ${text(value)}`, style: { width: `${(100 * value) / (total(parts) || 1)}%`, background: colour(name) } }))))),
    h("div", { class: "keys" }, names.map((name) => h("span", {}, h("i", { class: "swatch", style: { background: colour(name) } }), name))));
}

const PARTS = { training: "#009e73", waiting: "#e69f00", starting: "#56b4e9", pausing: "#d55e00", "catching up": "#cc79a7", other: "#7d8894" };
const total = (parts) => parts.reduce((sum, [, value]) => sum + value, 0);
