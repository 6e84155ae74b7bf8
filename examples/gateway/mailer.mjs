// Produces and consumes tasks over HTTP with Node 20 and nothing else.
//
//   node mailer.mjs produce ada grace     submits a mail to each, due in a second
//   node mailer.mjs consume               sends what is due, until SIGTERM or Ctrl-C

import { setTimeout as sleep } from "node:timers/promises";

const { TOC, TOKEN, TOPIC = "mail.send" } = process.env;

// Make a call, again if it is worth it: the gateway is away, busy, or its answer was lost.
async function call(path, body, { headers = {}, signal } = {}) {
  for (let attempt = 0; attempt < 8; attempt++) {
    let pause = Math.min(200 * 2 ** attempt, 10_000);
    try {
      const answer = await fetch(`${TOC}/v1/${path}`, {
        method: "POST",
        headers: { authorization: `Bearer ${TOKEN}`, "content-type": "application/json", ...headers },
        body: JSON.stringify(body),
        signal,
      });
      if (answer.ok) return await answer.json();
      const problem = await answer.text();
      if (answer.status !== 429 && answer.status !== 503) throw Object.assign(new Error(problem), { final: true });
      pause = Math.max(pause, 1000 * Number(answer.headers.get("retry-after") ?? 0));
    } catch (error) {
      if (error.final || signal?.aborted) throw error;
      console.error("again:", error.cause?.message ?? error.message);
    }
    await sleep(pause * (0.5 + Math.random() / 2));
  }
  throw new Error(`${path}: no answer after 8 attempts`);
}

// Submit one mail. Repeated after a lost answer, it gives the same task.
async function produce(to) {
  const key = `welcome-${to}`;
  const task = { biz_id: to, delay: 1, attribute: { to }, dedup_key: key };
  const { job_id } = await call(`topics/${TOPIC}/tasks`, task, { headers: { "idempotency-key": key } });
  console.log("submitted", job_id);
}

// Pull, work, ack. A signal breaks off a pull that waits, and nothing else: what that was given comes again.
async function consume() {
  const stop = new AbortController();
  for (const name of ["SIGTERM", "SIGINT"]) process.on(name, () => stop.abort());
  while (!stop.signal.aborted) {
    let tasks;
    try {
      ({ tasks } = await call(`topics/${TOPIC}:pull`, { max: 10, wait: 20, ttr: 60 }, { signal: stop.signal }));
    } catch (error) {
      if (stop.signal.aborted) return;
      throw error;
    }
    const done = [];
    for (const { job_id, lease, attribute } of tasks) {
      if (attribute.to) {
        console.log("sent", attribute.to, job_id); // a task may come twice: its job_id tells
        done.push(lease);
      } else {
        await call("leases:nack", { lease, dead: true, error: "there is no 'to'" });
      }
    }
    if (done.length) await call("leases:ack", { leases: done });
  }
}

const [what, ...names] = process.argv.slice(2);
if (what === "consume") await consume();
else for (const name of names) await produce(name);
