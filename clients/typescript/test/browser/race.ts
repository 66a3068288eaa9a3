/** A tab of the race. The parameters are in the query of the page's URL. */

import { Latchkey, localStorageStore, NoSessionError } from "@latchkey/client";
import type { FromTab, ToTab } from "./coordinator.js";

const LIFETIME = 900_000;
const KEY = "session";

const parameters = new URLSearchParams(location.search);
const parameter = (name: string) => parameters.get(name) ?? "";
const wanted = Number(parameter("refreshes"));

const counts = { refreshes: 0, requests: 0, lost: 0, unreachable: 0, unavailable: 0, held: 0 };
const worker = new SharedWorker("/build/browser/coordinator.js", { type: "module" });
const waiting = new Map<ToTab["kind"], (message: ToTab) => void>();
/** One channel for the page: a browser can garbage-collect a channel that nothing refers to, with its messages. */
const alarm = new MessageChannel();
const yielding: (() => void)[] = [];
let now = Date.now();
let isFirstAttempt = false;

alarm.port1.onmessage = () => yielding.shift()?.();

worker.port.onmessage = ({ data }: MessageEvent<ToTab>) => {
  waiting.get(data.kind)?.(data);
};

function post(message: FromTab): void {
  worker.port.postMessage(message);
}

function next<K extends ToTab["kind"]>(...kinds: K[]): Promise<Extract<ToTab, { kind: K }>> {
  return new Promise((resolve) => {
    for (const kind of kinds) waiting.set(kind, (message) => resolve(message as Extract<ToTab, { kind: K }>));
  });
}

/** Lets other tasks run. Browsers delay the timers of hidden tabs, but not messages. */
function yieldToOtherTasks(): Promise<void> {
  return new Promise((resolve) => {
    yielding.push(resolve);
    alarm.port2.postMessage(null);
  });
}

function stored(): { generation: number; openedAt: number } | null {
  return JSON.parse(localStorage.getItem(KEY) ?? "null") as { generation: number; openedAt: number } | null;
}

function storedGeneration(): number {
  return stored()?.generation ?? 0;
}

async function until(condition: () => boolean): Promise<void> {
  const end = performance.now() + 10_000;
  while (!condition() && performance.now() < end) await yieldToOtherTasks();
}

async function unreliableFetch(input: RequestInfo | URL, init?: RequestInit): Promise<Response> {
  if (!String(input).endsWith("/token")) return fetch(input, init);
  if (isFirstAttempt) {
    isFirstAttempt = false;
    const send = next("send");
    post({ kind: "sending" });
    await send;
  }
  const fate = Math.random();
  if (fate < 0.05) {
    counts.unreachable += 1;
    throw new TypeError("not sent");
  }
  counts.requests += 1;
  const { status, headers, body } = await fetch(input, init).then(async (response) => ({
    status: response.status,
    headers: response.headers,
    body: await response.text(),
  }));
  if (fate < 0.35) {
    counts.lost += 1;
    throw new TypeError("lost");
  }
  if (fate < 0.4) {
    counts.unavailable += 1;
    return new Response("<h1>Unavailable</h1>", { status: 503, headers: { "Retry-After": "1" } });
  }
  if (fate < 0.5) {
    counts.held += 1;
    const released = next("release");
    post({ kind: "held" });
    const { generation } = await released;
    await until(() => storedGeneration() >= generation);
  }
  return new Response(body, { status, headers });
}

function log(line: string): void {
  document.getElementById("log")!.append(`${line}\n`);
}

async function run(): Promise<void> {
  const client = new Latchkey({
    url: parameter("url"),
    app: parameter("app"),
    store: localStorageStore(KEY),
    fetch: unreliableFetch,
    clock: {
      now: () => now,
      sleep: async (milliseconds) => {
        now += milliseconds;
        await yieldToOtherTasks();
      },
    },
  });
  if (parameters.has("email")) await client.login({ email: parameter("email"), password: parameter("password") });
  const session = await client.session.current();
  if (!session) throw new NoSessionError();
  log(`session ${session.sessionId}`);
  // The tabs need the same clock.
  const start = stored()!.openedAt;

  let go = next("go");
  post({ kind: "join", tabs: Number(parameter("tabs")) });
  while (counts.refreshes < wanted) {
    now = start + (await go).round * LIFETIME;
    go = next("go");
    isFirstAttempt = true;
    for (;;) {
      try {
        await client.session.accessToken();
        break;
      } catch (error) {
        if (error instanceof NoSessionError) throw error;
        now += 1000;
        await yieldToOtherTasks();
      }
    }
    counts.refreshes += 1;
    if (counts.refreshes % 20 === 0) log(`${counts.refreshes} refreshes`);
    if (counts.refreshes < wanted) post({ kind: "ready", generation: storedGeneration() });
  }
  const finish = next("finish");
  post({ kind: "done" });
  await finish;

  const { id } = await client.user();
  const { sessions } = await client.sessions();
  const isSame = (await client.session.current())?.sessionId === session.sessionId && id === session.userId;
  const isCurrent = sessions.find(({ current }) => current)?.id === session.sessionId;
  if (!isSame || !isCurrent) throw new Error("the session is another one");
  log(JSON.stringify({ ...counts, generation: storedGeneration() }));
  log("the session is valid");
}

run().catch((error: Error) => log(`failed: ${error.name}: ${error.message}`));
