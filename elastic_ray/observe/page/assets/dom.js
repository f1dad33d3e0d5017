// Elements and texts. Whatever comes from the cluster becomes a text node, never markup.

export const $ = (id) => document.getElementById(id);

// h("b", {class: "x", onclick: f}, "text", child...): an element. Attributes of null are left out.
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Three significant digits, thousands as k, millions as M.
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  return String(Number(value.toPrecision(3)));
}

// A span of time in its two largest units, as the command line has it.
export function span(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  const sign = seconds < 0 ? "-" : "";
  const whole = Math.floor(Math.abs(seconds));
  const two = (n) => String(n).padStart(2, "0");
  if (whole < 60) return `${sign}${whole < 10 ? Math.abs(seconds).toFixed(1) : whole}s`;
  if (whole < 3600) return `${sign}${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  if (whole < 86400) return `${sign}${Math.floor(whole / 3600)}h${two(Math.floor((whole % 3600) / 60))}m`;
  return `${sign}${Math.floor(whole / 86400)}d${two(Math.floor((whole % 86400) / 3600))}h`;
}

export function bytes(value) {
  const unit = value >= 2 ** 30 ? ["GiB", 2 ** 30] : ["MiB", 2 ** 20];
  return `${number(value / unit[1])} ${unit[0]}`;
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`);

// A job's metric by name, or else the one that it names, or its first: [name, value].
export function metricOf(job, chosen = "") {
  const name = chosen || job.metric || Object.keys(job.metrics)[0] || "";
  return [name, job.metrics[name] ?? null];
}

// A step of an axis of times, round for people, of at least so many seconds.
export function niceTime(least) {
  return [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800]
    .find((step) => step >= least) ?? Math.max(2592000, least);
}

export function plural(n, noun) {
  return `${n} ${noun}${n === 1 ? "" : "s"}`;
}

// A simulation's times count from its start; others are times of day, with the date where it is not today's.
export function clock(time_s, simulated) {
  if (simulated) return span(time_s);
  const date = new Date(1000 * time_s);
  const time = date.toLocaleTimeString([], { hour12: false });
  return date.toDateString() === new Date().toDateString() ? time : `${date.getMonth() + 1}/${date.getDate()} ${time}`;
}

export function table(heads, rows) {
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, place) =>
      h("td", { "data-head": heads[place], class: typeof cell === "string" && cell.length > 30 ? "text" : null }, cell)))))));
}

export function bar(part, text) {
  const width = `${Math.max(0, Math.min(1, part ?? 0)) * 100}%`;
  return h("span", {}, h("span", { class: "bar", "aria-hidden": "true" }, h("i", { style: { width } })), text);
}
