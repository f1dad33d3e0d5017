// What the page knows: one snapshot, then changes as they come over one stream (Server-Sent Events).

const KEYS = { jobs: "job", nodes: "node", decisions: "number", tenants: "tenant", wanted: "type", bars: 0, marks: 0, use: 0 };
const RETRY_MS = 2000;

export class Refused extends Error {}

export class Store {
  constructor() {
    this.tables = {};
    for (const name of Object.keys(KEYS)) this.tables[name] = new Map();
    this.strip = {};
    this.source = {};
    this.time_s = 0;
    this.behind_s = 0; // the server's clock less this browser's
    this.token = "";
    this.metric = ""; // that is shown of jobs; empty for each job's own
    this.listeners = [];
    this.wanted = new Set();
  }

  rows(name) {
    return [...this.tables[name].values()];
  }

  get now_s() {
    return this.source.kind === "live" ? Date.now() / 1000 + this.behind_s : this.time_s;
  }

  get simulated() {
    return this.source.kind === "simulation";
  }

  // f(names of what has changed), before the next frame at the earliest.
  onChange(f) {
    this.listeners.push(f);
  }

  async ask(path, options = {}) {
    const headers = { ...(options.headers ?? {}) };
    if (this.token) headers.Authorization = `Bearer ${this.token}`;
    const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    if (answer.ok) return answer;
    let why = answer.statusText;
    try { why = (await answer.json()).error; } catch { /* not ours */ }
    throw answer.status === 401 ? new Refused(why) : new Error(why);
  }

  // Follow the stream, and open it again whenever it ends; tell(state, why) says how it goes.
  async follow(tell) {
    for (;;) {
      try {
        const answer = await this.ask("api/events");
        tell("connected", "");
        await this.read(answer.body.getReader());
        tell("lost", "the stream ended");
      } catch (error) {
        tell(error instanceof Refused ? "refused" : "lost", error.message);
        if (error instanceof Refused) return;
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  async read(reader) {
    const decoder = new TextDecoder();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += decoder.decode(value, { stream: true });
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        this.take(text.slice(0, end));
        text = text.slice(end + 2);
      }
    }
  }

  take(message) {
    let kind = "";
    let data = "";
    for (const line of message.split("\n")) {
      if (line.startsWith("event: ")) kind = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (data) this.apply(JSON.parse(data), kind === "snapshot");
  }

  apply(value, whole) {
    for (const [name, part] of Object.entries(value)) {
      if (name === "time_s") {
        this.time_s = part;
        this.behind_s = part - Date.now() / 1000;
        continue;
      }
      this.wanted.add(name);
      const key = KEYS[name];
      if (key === undefined) {
        this[name] = part;
        continue;
      }
      if (whole) this.tables[name].clear();
      for (const row of whole ? part : part.set) this.tables[name].set(row[key], row);
      for (const gone of whole ? [] : part.remove) this.tables[name].delete(gone);
    }
    this.tell();
  }

  tell() {
    if (this.pending) return;
    this.pending = true;
    const go = () => {
      this.pending = false;
      const names = this.wanted;
      this.wanted = new Set();
      for (const listener of this.listeners) listener(names);
    };
    if (document.hidden) setTimeout(go, 200);
    else requestAnimationFrame(go);
  }
}
