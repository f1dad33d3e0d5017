// The cluster in one line: slots by GPU type, jobs, price, speed, the last decision, the policy.

import { $, h, number, span } from "./dom.js";

const STATES = [
  ["used", "used", "#0072b2"], ["starting", "starting", "#56b4e9"], ["draining", "draining", "#d55e00"],
  ["idle", "idle", "var(--idle)"], ["other", "others'", "var(--other)"],
];

export function drawStrip(store) {
  const strip = store.strip;
  const parts = (strip.slots ?? []).map(slots);
  const jobs = store.rows("jobs");
  const ended = jobs.filter((job) => job.ended_s !== null).length;
  parts.push(store.source.kind === "live"
    ? fact(String(strip.running ?? 0), `running; ${strip.waiting ?? 0} waiting, ${strip.held ?? 0} held, ${ended} ended`, "jobs")
    : fact(String(jobs.length), `jobs, of which ${ended} have ended`, "jobs"));
  if (strip.usd_per_h !== null && strip.usd_per_h !== undefined) parts.push(fact(number(strip.usd_per_h), "USD/h for the nodes wanted", "price"));
  if (strip.speed !== null && strip.speed !== undefined) parts.push(speed(strip));
  if (strip.policy) parts.push(fact(strip.policy, strip.settled ? "policy" : "policy; still listening to jobs", "policy"));
  if (store.source.kind === "live") parts.push(decision(store));
  $("strip").replaceChildren(...parts);
}

function fact(value, text, name) {
  return h("div", { class: "fact", "data-fact": name }, h("b", {}, value), h("span", {}, text));
}

function slots(count) {
  const all = STATES.reduce((sum, [name]) => sum + count[name], 0) || 1;
  return h("div", { class: "slots fact", "data-fact": `slots ${count.type}` },
    h("b", {}, `${count.used + count.starting} / ${all}`), h("span", {}, `${count.type} slots in use`),
    h("div", { class: "stack", "aria-hidden": "true" }, STATES.map(([name, , colour]) =>
      h("i", { style: { width: `${(100 * count[name]) / all}%`, background: colour } }))),
    h("div", { class: "keys" }, STATES.filter(([name]) => count[name]).map(([name, word, colour]) =>
      h("span", {}, h("i", { class: "swatch", style: { background: colour } }), `${count[name]} ${word}`))));
}

function speed(strip) {
  const against = (value) => (value > 0 ? `${number(strip.speed / value)} x` : "–");
  return fact(number(strip.speed), `goodput, in jobs of the smallest size: ${against(strip.speed_one_each)} that of one worker each, `
    + `${against(strip.speed_equal)} equal shares`, "goodput");
}

function decision(store) {
  const strip = store.strip;
  if (strip.decided_s === null || strip.decided_s === undefined) return fact("–", "no decision yet", "decision");
  const cpu = strip.decision_cpu_s === null ? "" : `, took ${number(1000 * strip.decision_cpu_s)} ms of CPU`;
  return fact(`${span(Math.max(store.now_s - strip.decided_s, 0))} ago`, `last decision${cpu}`, "decision");
}

export const describe = (store) => ({
  live: `cluster at ${store.source.name}`, files: `runs in ${store.source.name}`, simulation: `simulation of ${store.source.name}`,
})[store.source.kind] ?? "";


