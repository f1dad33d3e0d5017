// The page: connects the store to its sections.

import { $, clock, h, table } from "./dom.js";
import { Jobs } from "./jobs.js";
import { Store } from "./store.js";
import { describe, drawStrip } from "./strip.js";
import { Timeline } from "./timeline.js";

const store = new Store();
const choose = (job) => { jobs.chosen = job; jobs.draw(); };
const timeline = new Timeline(store, choose);
const jobs = new Jobs(store, choose);

store.onChange((changed) => {
  drawStrip(store);
  if (changed.has("source")) $("source").textContent = describe(store);
  timeline.update(changed);
  if (changed.has("jobs")) jobs.update();
  if (changed.has("decisions")) drawDecisions();
});

function drawDecisions() {
  const rows = store.rows("decisions").slice(-50).reverse();
  $("decision-rows").replaceChildren(rows.length ? table(["When", "Trigger", "Job", "Workers", "Reason"], rows.map((d) =>
    [clock(d.time_s, store.simulated), d.trigger, d.job, d.job ? `${d.before} → ${d.after}` : "", d.reason])) : h("p", { class: "soft" }, "no decisions"));
}

store.follow((state, why) => { $("state").textContent = why || state; });
