// Receives events of Latchkey and prints each one as a line of JSON.
//
// WEBHOOK_KEY: the key `current` of the webhook's Secret. PORT: where to listen; 8000 by default.
import { createServer } from "node:http";
import { Webhook } from "standardwebhooks";

interface LatchkeyEvent {
  type: string;
  timestamp: string;
  data: {
    app: string;
    user_id: string | null;
    session_id: string | null;
    version: number | null;
    detail: Record<string, unknown> | null;
    /** Only if the webhook includes `Profile`. */
    user?: User | null;
  };
}

interface User {
  email: string | null;
  email_verified: boolean;
  name: string;
  state: "active" | "disabled" | "contested" | "unverified";
  external_id: string | null;
  version: number;
}

const MAX_BODY = 1024 * 1024;
const webhook = new Webhook(process.env.WEBHOOK_KEY ?? "");

const server = createServer(async (request, response) => {
  let event: LatchkeyEvent;
  try {
    // The signature covers the bytes of the body, so verify these bytes, not JSON that was parsed and written again.
    const chunks: Buffer[] = [];
    let size = 0;
    for await (const chunk of request) {
      size += chunk.length;
      if (size > MAX_BODY) throw new Error("the body is too large");
      chunks.push(chunk);
    }
    event = webhook.verify(Buffer.concat(chunks), request.headers as Record<string, string>) as LatchkeyEvent;
  } catch (error) {
    console.error(`refused: ${error instanceof Error ? error.message : error}`);
    response.writeHead(400).end();
    return;
  }
  // Store the event here, before the response: after a 2xx, Latchkey does not send it again.
  console.log(JSON.stringify({ id: request.headers["webhook-id"], ...event }));
  response.writeHead(204).end();
});

server.listen(Number(process.env.PORT ?? 8000));
