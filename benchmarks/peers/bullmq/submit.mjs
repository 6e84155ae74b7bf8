// Reads lines [numbers, due milliseconds]; adds the tasks, all in one call where there are several.
// Answers each line with how many are not finished (asked only by an empty line), else with 0.
import { createInterface } from "node:readline";
import { Queue } from "bullmq";

const url = new URL(process.env.BENCH_REDIS);
const queue = new Queue("bench", { connection: { host: url.hostname, port: Number(url.port) } });
const options = (due) => {
  const now = Date.now();
  return {
    timestamp: now,
    delay: Math.max(0, due - now),
    removeOnComplete: true,
    removeOnFail: true,
    attempts: 3,
  };
};

for await (const line of createInterface({ input: process.stdin })) {
  const [numbers, dues] = JSON.parse(line);
  let left = 0;
  if (numbers.length === 0) {
    const counts = await queue.getJobCounts("wait", "active", "delayed", "prioritized");
    left = Object.values(counts).reduce((sum, count) => sum + count, 0);
  } else if (numbers.length === 1) {
    await queue.add("start", numbers[0], options(dues[0]));
  } else {
    await queue.addBulk(numbers.map((n, i) => ({ name: "start", data: n, opts: options(dues[i]) })));
  }
  process.stdout.write(`${left}\n`);
}
await queue.close();
