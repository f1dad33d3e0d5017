// Which lanes of a node's row a bar is drawn on: in one piece where there is room, as in the simulator's picture.

const MOST_LANES = 4096;

// bars: [number, node, job, from, to, slots, decision], nodes: rows by id, now_s: the end of bars that have none.
// Gives [{bar, from, to, pieces: [[first lane, lanes]...]}] by node, in the order of their beginning.
export function lanes(bars, nodes, now_s) {
  const byNode = new Map();
  for (const bar of bars) {
    if (!byNode.has(bar[1])) byNode.set(bar[1], []);
    byNode.get(bar[1]).push(bar);
  }
  const placed = new Map();
  for (const [node, own] of byNode) {
    own.sort((a, b) => a[3] - b[3] || a[0] - b[0]);
    const slots = Math.min(Math.max(Math.floor(nodes.get(node)?.slots ?? 1), 1), MOST_LANES);
    const until = new Array(slots).fill(-Infinity);
    placed.set(node, own.map((bar) => {
      const from = bar[3];
      const to = bar[4] ?? Math.max(now_s, from);
      const pieces = take(until, from, Math.min(bar[5], slots));
      for (const [first, count] of pieces) until.fill(to, first, first + count);
      return { bar, from, to, pieces };
    }));
  }
  return placed;
}

function take(until, from, wanted) {
  const free = [];
  for (let lane = 0; lane < until.length; lane += 1) if (until[lane] <= from + 1e-9) free.push(lane);
  for (let i = 0; i + wanted <= free.length; i += 1) {
    if (free[i + wanted - 1] - free[i] === wanted - 1) return [[free[i], wanted]];
  }
  const pieces = [];
  for (const lane of free.slice(0, wanted)) {
    const last = pieces[pieces.length - 1];
    if (last && last[0] + last[1] === lane) last[1] += 1;
    else pieces.push([lane, 1]);
  }
  return pieces.length ? pieces : [[0, Math.min(1, until.length)]];
}
