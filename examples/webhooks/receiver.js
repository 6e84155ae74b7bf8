// A receiver of toc's webhooks with nothing but Node.
//
// WEBHOOK_SECRET=whsec_... node receiver.js 8080
"use strict";
const crypto = require("crypto");
const http = require("http");

const TOLERANCE_SECONDS = 300;
const MOST_BYTES = 4 << 20;
const secret = Buffer.from((process.env.WEBHOOK_SECRET || "").replace(/^whsec_/, ""), "base64");
// Ids of what was dealt with. A real receiver keeps them in its database, in the transaction of its work.
const seen = new Set();

function verified(headers, body) {
  const id = headers["webhook-id"], timestamp = headers["webhook-timestamp"];
  const given = (headers["webhook-signature"] || "").split(" ");
  if (!id || Math.abs(Date.now() / 1000 - Number(timestamp)) > TOLERANCE_SECONDS || Number.isNaN(Number(timestamp))) {
    return false;
  }
  const signed = Buffer.concat([Buffer.from(`${id}.${timestamp}.`), body]);
  const expected = Buffer.from("v1," + crypto.createHmac("sha256", secret).update(signed).digest("base64"));
  return given.some((one) => one.length === expected.length && crypto.timingSafeEqual(Buffer.from(one), expected));
}

if (!secret.length) {
  console.error("set WEBHOOK_SECRET to what `toc target create` has printed");
  process.exit(1);
}
const server = http.createServer((request, response) => {
  const parts = [];
  let length = 0;
  request.on("data", (part) => {
    length += part.length;
    if (length <= MOST_BYTES) parts.push(part);
  });
  request.on("end", () => {
    const body = Buffer.concat(parts);
    if (request.method !== "POST" || !verified(request.headers, body)) {
      response.writeHead(401, { "Content-Length": 0 }).end();
      return;
    }
    if (!seen.has(request.headers["webhook-id"])) {
      seen.add(request.headers["webhook-id"]);
      const { "toc-topic": topic, "toc-biz-id": biz_id } = request.headers;
      console.log(JSON.stringify({ topic, biz_id, task: JSON.parse(body) }));
    }
    response.writeHead(204).end();
  });
});
server.listen(Number(process.argv[2] || 8080), "127.0.0.1", () =>
  console.error(`listening on ${server.address().port}`));
