// A worker process: writes each start as benchmarks/record.py does, sixteen bytes in one write.
import { closeSync, existsSync, openSync, writeSync } from "node:fs";
import { dirname } from "node:path";
import { Worker } from "bullmq";

const url = new URL(process.env.BENCH_REDIS);
const starts = process.argv[2];
const file = openSync(`${starts}/${process.pid}`, "a");
const record = Buffer.alloc(16);
const DIES = 2 ** 52;

const worker = new Worker(
  "bench",
  async (job) => {
    const microseconds = Math.floor((performance.timeOrigin + performance.now()) * 1000);
    record.writeBigUInt64LE(BigInt(job.data), 0);
    record.writeBigUInt64LE(BigInt(microseconds) * 1000n, 8);
    writeSync(file, record);
    if (job.data >= DIES) {
      const marker = `${dirname(starts)}/died-${job.data}`;
      if (!existsSync(marker)) {
        closeSync(openSync(marker, "w"));
        process.kill(process.pid, "SIGKILL");
      }
    }
  },
  { connection: { host: url.hostname, port: Number(url.port) }, concurrency: 100 },
);
worker.on("error", (error) => console.error(error));
process.on("SIGTERM", async () => {
  await worker.close();
  process.exit(0);
});
