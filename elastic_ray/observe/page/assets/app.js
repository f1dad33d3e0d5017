// The page: connects the store to its sections; keys, theme and token.

import { $, clock, h, table } from "./dom.js";
import { Compare, drawSweeps, drawTenants, drawWanted, WhatIf } from "./cluster.js";
import { JobView } from "./job.js";
import { Jobs } from "./jobs.js";
import { Store } from "./store.js";
import { describe, drawStrip } from "./strip.js";
import { Timeline } from "./timeline.js";

const store = new Store();
const detail = new JobView(store);
const jobs = new Jobs(store, (job) => detail.choose(job));
const timeline = new Timeline(store, (job) => { jobs.pick(job); $("job").scrollIntoView({ block: "nearest" }); });
new WhatIf(store);
const compare = new Compare(store, () => { jobs.update(); detail.draw(); });

store.onChange((changed) => {
  if (changed.has("strip") || changed.has("source")) drawStrip(store);
  if (changed.has("source")) drawSource();
  if (changed.has("bars") || changed.has("nodes") || changed.has("marks") || changed.has("use")) timeline.update(changed);
  if (changed.has("jobs")) { jobs.update(); detail.update(); compare.update(); }
  if (changed.has("tenants") || changed.has("source")) drawTenants(store);
  if (changed.has("wanted") || changed.has("source")) drawWanted(store);
  if (changed.has("jobs") || changed.has("bars")) drawSweeps(store);
  if (changed.has("decisions")) drawDecisions();
  for (const link of document.querySelectorAll("nav a")) link.hidden = document.querySelector(link.hash).hidden;
  document.body.dataset.ready = "yes";
});

// Ages and the end of bars move on though nothing has changed.
setInterval(() => {
  if (store.source.kind !== "live" || document.hidden) return;
  drawStrip(store);
  timeline.draw();
}, 1000);

function drawSource() {
  $("source").textContent = describe(store);
  $("what-if").hidden = store.source.kind !== "live";
  if (store.source.problem) tell("behind", store.source.problem);
  else tell("connected", "");
}

function drawDecisions() {
  const rows = store.rows("decisions").slice(-50).reverse();
  $("decisions").hidden = !rows.length;
  $("decision-rows").replaceChildren(table(["When", "Trigger", "Job", "Workers", "Reason"], rows.map((d) =>
    [clock(d.time_s, store.simulated), d.trigger, d.job, d.job ? `${d.before} → ${d.after}` : "", d.reason])));
}

function tell(state, why) {
  $("state").textContent = state === "connected" ? (store.source.kind === "live" ? "live" : "") : `${why || state}; trying again`;
  $("state").className = state === "connected" ? "good" : "bad";
}

function follow() {
  store.follow((state, why) => {
    if (state === "refused") askToken(why);
    else if (state !== "connected") tell(state, why);
  });
}

// The token stays in this tab's memory: it is not stored, and no other page can read it.
function askToken(why) {
  $("ask-why").textContent = why;
  $("ask-token").value = "";
  $("ask").returnValue = "";
  $("ask").showModal();
}

$("ask").addEventListener("close", () => {
  if ($("ask").returnValue !== "ok") return;
  store.token = $("ask-token").value.trim();
  if (!store.source.kind) follow();
});
$("token").addEventListener("click", () => askToken("It was printed when the page was started."));

// #token=... in the address spares typing it; it never leaves the browser but in a header, and is taken out at once.
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  store.token = given;
  history.replaceState(null, "", location.pathname);
}

function theme(next) {
  document.documentElement.dataset.theme = next;
  try { localStorage.setItem("theme", next); } catch { /* not allowed here */ }
  timeline.draw();
}
let stored = null;
try { stored = localStorage.getItem("theme"); } catch { /* not allowed here */ }
theme(stored ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
const other = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
$("theme").addEventListener("click", other);

document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
  const go = (element) => { event.preventDefault(); element.focus(); element.scrollIntoView({ block: "nearest" }); };
  if (event.key === "/") go($("find"));
  else if (event.key === "t") other();
  else if (event.key === "j") go(jobs.grid);
  else if (event.key === "l") go(timeline.canvas);
});

follow();
