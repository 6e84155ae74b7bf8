// BullMQ behind a thin route: POST /add {"delay": ms, "due": ms}, POST /pull waits for a job, POST /ack {"id"}.
// A job is handed to whoever has waited longest and ends with its ack.
import { createServer } from "node:http";
import { Queue, Worker } from "bullmq";

const url = new URL(process.env.BENCH_REDIS);
const connection = { host: url.hostname, port: Number(url.port) };
const queue = new Queue("bench", { connection });
const waiting = [];
const running = new Map();
const worker = new Worker(
  "bench",
  (job) =>
    new Promise((resolve) => {
      running.set(job.id, resolve);
      const hand = (answer) => answer.end(JSON.stringify({ id: job.id, due: job.data.due }));
      const give = () => (waiting.length ? hand(waiting.shift()) : setTimeout(give, 1));
      give();
    }),
  { connection, concurrency: 1000 },
);
worker.on("error", (error) => console.error(error));

const calls = {
  "/healthz": (body, answer) => answer.end("{}"),
  "/add": async (body, answer) => {
    const job = await queue.add("task", body, { delay: body.delay, removeOnComplete: true, attempts: 3 });
    answer.statusCode = 201;
    answer.end(JSON.stringify({ id: job.id }));
  },
  "/pull": (body, answer) => {
    waiting.push(answer);
    answer.on("close", () => {
      const place = waiting.indexOf(answer); // its client left
      if (place >= 0) waiting.splice(place, 1);
    });
  },
  "/ack": (body, answer) => {
    running.get(body.id)?.();
    running.delete(body.id);
    answer.end("{}");
  },
};
const server = createServer((request, answer) => {
  const chunks = [];
  request.on("data", (chunk) => chunks.push(chunk));
  request.on("end", () => calls[request.url](chunks.length ? JSON.parse(Buffer.concat(chunks)) : {}, answer));
});
server.keepAliveTimeout = 60_000;
server.listen(0, "127.0.0.1", () => console.log(server.address().port));
process.on("SIGTERM", () => process.exit(0));
