import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { ApiError, ConnectionError, NoSessionError, type Latchkey, type SessionStore } from "@latchkey/client";
import { credentials, error, FakeServer, type Fate, invalidGrant, isApiError, LIFETIME, sharedStore, VirtualClock } from "./harness.js";

const MINUTE = 60_000;
const HOUR = 60 * MINUTE;

let clock: VirtualClock;
let server: FakeServer;
let store: ReturnType<typeof sharedStore>;
let tab: Latchkey;

beforeEach(async () => {
  clock = new VirtualClock();
  server = new FakeServer(clock);
  store = sharedStore();
  tab = server.client({ store });
  await tab.login(credentials);
});

const expire = () => clock.advance(LIFETIME * 1000);
const accessToken = (client = tab) => clock.run(client.session.accessToken());

test("a valid access token is returned without a request", async () => {
  clock.advance((LIFETIME - 61) * 1000);
  assert.equal(await accessToken(), "access-1-1");
  assert.deepEqual(server.received, []);
});

test("an access token is refreshed a minute before it expires", async () => {
  clock.advance((LIFETIME - 60) * 1000);
  assert.equal(await accessToken(), "access-2-2");
  assert.equal(await accessToken(), "access-2-2");
  assert.deepEqual(server.received, ["refresh-1"]);
});

test("concurrent calls send one refresh", async () => {
  expire();
  const tokens = await clock.run(Promise.all(Array.from({ length: 8 }, () => tab.session.accessToken())));
  assert.deepEqual(new Set(tokens), new Set(["access-2-2"]));
  assert.deepEqual(server.received, ["refresh-1"]);
});

test("after a lost answer the same token is sent again", async () => {
  expire();
  server.fates = ["lose", "unreachable", "lose"];
  assert.equal(await accessToken(), "access-2-4");
  assert.deepEqual(server.received, ["refresh-1", "refresh-1", "refresh-1"]);
});

for (const [name, fate] of [
  ["a network fault", () => "unreachable"],
  ["500", () => error(500, "server_error")],
  ["503", () => error(503, "temporarily_unavailable", { "Retry-After": "5" })],
  ["429", () => error(429, "rate_limited", { "Retry-After": "7" })],
  ["408", () => error(408, "invalid_request")],
  ["the error page of a proxy", () => new Response("<h1>Bad Gateway</h1>", { status: 502 })],
  ["the login page of a network", () => new Response("<h1>Welcome</h1>", { status: 200 })],
  ["a response of another service", () => new Response("{}", { status: 200 })],
  ["an error of another service", () => new Response("{}", { status: 403 })],
] satisfies [string, () => Fate][]) {
  test(`${name} does not end the session`, async () => {
    expire();
    for (let hour = 0; hour < 48; hour += 1) {
      server.fates = Array.from({ length: 100 }, fate as () => Fate);
      await assert.rejects(accessToken(), (thrown) => thrown instanceof ApiError || thrown instanceof ConnectionError);
      clock.advance(HOUR);
    }
    assert.deepEqual(server.received, []);
    server.fates = [];
    assert.equal(await accessToken(), "access-2-2");
  });
}

for (const [status, code] of [[400, "invalid_request"], [401, "invalid_client"], [404, "app_not_found"]] as const) {
  test(`${status} ${code} is reported at once and does not end the session`, async () => {
    expire();
    server.fates = [error(status, code)];
    await assert.rejects(accessToken(), isApiError(code, status));
    assert.equal(server.fates.length, 0);
    clock.advance(1000);
    assert.equal(await accessToken(), "access-2-2");
  });
}

test("a call fails after 30 seconds, with the last error", async () => {
  expire();
  server.fates = Array.from({ length: 100 }, () => "unreachable" as const);
  const start = clock.now();
  await assert.rejects(accessToken(), ConnectionError);
  assert.ok(clock.now() - start <= 30_000);
  assert.ok(100 - server.fates.length >= 4, "the refresh was repeated");
});

test("no request is sent before the time in Retry-After", async () => {
  expire();
  server.fates = [error(503, "temporarily_unavailable", { "Retry-After": "20" })];
  const start = clock.now();
  assert.equal(await accessToken(), "access-2-2");
  assert.ok(clock.now() - start >= 20_000);
});

test("a long Retry-After is reported at once, and is respected by later calls", async () => {
  expire();
  server.fates = [error(429, "rate_limited", { "Retry-After": "600" })];
  const start = clock.now();
  for (let call = 0; call < 5; call += 1) {
    const isLimited = (thrown: unknown) => thrown instanceof ApiError && thrown.retryAfter === 600;
    await assert.rejects(accessToken(), isLimited);
  }
  assert.equal(clock.now(), start);
  assert.deepEqual(server.received, []);
  clock.advance(600_000);
  assert.equal(await accessToken(), "access-2-2");
});

test("while the access token is valid, a failed refresh goes unnoticed", async () => {
  clock.advance((LIFETIME - 30) * 1000);
  server.fates = ["unreachable", error(404, "app_not_found"), error(503, "temporarily_unavailable", { "Retry-After": "9" })];
  const start = clock.now();
  for (let call = 0; call < 6; call += 1) {
    assert.equal(await accessToken(), "access-1-1");
    clock.advance(1000);
  }
  assert.equal(clock.now() - start, 6000);
  assert.equal(server.fates.length, 0);
});

test("only invalid_grant ends the session, in all tabs", async () => {
  const other = server.client({ store });
  const changes: unknown[] = [];
  other.session.onChange((session) => changes.push(session?.sessionId ?? null));
  await accessToken(other);
  server.isLive = false;
  expire();
  await assert.rejects(accessToken(), NoSessionError);
  await assert.rejects(accessToken(other), NoSessionError);
  assert.deepEqual(server.received, ["refresh-1"]);
  assert.deepEqual(changes, [null]);
  assert.ok(!store.value?.includes("refresh-1"), "the tokens are not stored any longer");
});

test("invalid_grant for a token that another tab has replaced does not end the session", async () => {
  const other = server.client({ store });
  expire();
  server.fates = [
    async () => {
      await other.session.accessToken();
      return invalidGrant();
    },
  ];
  assert.equal(await accessToken(), "access-2-2");
});

test("an answer that arrives late does not replace newer tokens", async () => {
  const slow = server.client({ store });
  expire();
  let release = () => {};
  server.fates = [
    (handle) => {
      const response = handle();
      return new Promise((resolve) => (release = () => resolve(response)));
    },
  ];
  const late = slow.session.accessToken();
  await new Promise(setImmediate);
  for (let refresh = 0; refresh < 3; refresh += 1) {
    await accessToken();
    expire();
  }
  assert.equal(server.generation, 4);
  release();
  await clock.run(late);
  const fresh = server.client({ store });
  await accessToken(fresh);
  assert.ok(server.isLive);
  assert.equal(server.received.at(-1), "refresh-4");
});

test("a tab reads the store again before it repeats a refresh", async () => {
  const slow = server.client({ store });
  expire();
  server.fates = ["unreachable"];
  const repeated = slow.session.accessToken();
  await new Promise(setImmediate);
  for (let refresh = 0; refresh < 3; refresh += 1) {
    await tab.session.accessToken();
    expire();
  }
  await clock.run(repeated);
  assert.ok(server.isLive);
  assert.equal(server.received.filter((token) => token === "refresh-1").length, 1);
});

test("a tab restores its newer tokens if the store lost them", async () => {
  const old = store.value!;
  expire();
  await accessToken();
  const newer = store.value!;
  store.value = old;
  assert.equal(await accessToken(), "access-2-2");
  assert.equal(store.value, newer);
});

test("a refresh during a logout does not log in again", async () => {
  const other = server.client({ store });
  expire();
  server.fates = [
    async (handle) => {
      const response = handle();
      await other.logout();
      return response;
    },
  ];
  await assert.rejects(accessToken(), NoSessionError);
  assert.equal(await other.session.current(), null);
  assert.equal(await server.client({ store }).session.current(), null);
});

test("a logout without a connection takes effect in the tabs, and its failure is reported", async () => {
  const offline = server.client({ store, fetch: () => Promise.reject(new TypeError("fetch failed")) });
  await assert.rejects(offline.logout(), ConnectionError);
  assert.equal(await tab.session.current(), null);
});

test("a logout ends the session at the server", async () => {
  expire();
  await tab.logout();
  assert.equal(server.isLive, false);
  assert.equal(await tab.session.current(), null);
  await tab.logout();
});

test("a login in one tab is seen by the others", async () => {
  const other = server.client({ store });
  assert.deepEqual(await other.session.current(), { sessionId: "session-1", userId: "user" });
  await tab.logout();
  const changes: unknown[] = [];
  const unsubscribe = other.session.onChange((session) => changes.push(session));
  await tab.login(credentials);
  await new Promise(setImmediate);
  assert.deepEqual(changes, [null, { sessionId: "session-2", userId: "user" }]);
  unsubscribe();
  assert.equal(store.changed.size, 0);
});

test("a listener hears of the first login, but not of a session that was already stored", async () => {
  const changes: unknown[] = [];
  const record = (session: unknown) => changes.push(session !== null);
  server.client({ store }).session.onChange(record);
  await new Promise(setImmediate);
  assert.deepEqual(changes, []);
  const empty = sharedStore();
  const [one, other] = [server.client({ store: empty }), server.client({ store: empty })];
  one.session.onChange(record);
  other.session.onChange(record);
  await one.login(credentials);
  await new Promise(setImmediate);
  assert.deepEqual(changes, [true, true]);
});

test("a new login replaces the session, even if the clock went back", async () => {
  clock.advance(-HOUR);
  await tab.login(credentials);
  assert.equal(await accessToken(), "access-1-2");
  assert.equal(await accessToken(server.client({ store })), "access-1-2");
});

test("a cleared store is a logout", async () => {
  store.value = null;
  await assert.rejects(accessToken(), NoSessionError);
});

for (const text of ["", "x", "null", "{}", "[]", '{"openedAt":"x"}']) {
  test(`the stored text ${JSON.stringify(text)} is no session`, async () => {
    store.value = text;
    assert.equal(await server.client({ store }).session.current(), null);
  });
}

test("a store can be asynchronous", async () => {
  let value: string | null = null;
  const asynchronous: SessionStore = {
    get: async () => value,
    set: async (next) => void (value = next),
  };
  const client = server.client({ store: asynchronous });
  await client.login(credentials);
  expire();
  assert.equal(await accessToken(client), "access-2-3");
  assert.equal(await accessToken(server.client({ store: asynchronous })), "access-2-3");
});

test("a store that fails does not lose the session", async () => {
  expire();
  const { set } = store;
  store.set = () => {
    throw new Error("the disk is full");
  };
  await assert.rejects(accessToken(), /the disk is full/);
  store.set = set;
  assert.equal(await accessToken(), "access-2-2");
  assert.deepEqual(server.received, ["refresh-1"]);
});

test("a rejected access token is refreshed once, and the call is repeated", async () => {
  clock.advance(MINUTE);
  server.revokeAccessTokens();
  await clock.run(tab.user());
  assert.deepEqual(server.calls, ["GET /v1/shop/user access-1-1", "GET /v1/shop/user access-2-2"]);
});

test("a rejected access token that another tab has replaced is not refreshed again", async () => {
  const other = server.client({ store });
  clock.advance(MINUTE);
  server.revokeAccessTokens();
  await clock.run(other.user());
  assert.equal(await clock.run(tab.session.refresh("access-1-1")), "access-2-2");
  assert.deepEqual(server.received, ["refresh-1"]);
});

test("a rejected access token is refreshed while another call reads the valid token", async () => {
  clock.advance(MINUTE);
  server.revokeAccessTokens();
  const [valid, refreshed] = [tab.session.accessToken(), tab.session.refresh("access-1-1")];
  assert.equal(await clock.run(valid), "access-1-1");
  assert.equal(await clock.run(refreshed), "access-2-2");
});

test("a young access token is not refreshed, whoever rejects it", async () => {
  server.rejectsAccessTokens = true;
  clock.advance(MINUTE);
  // The limit for a call is 10 s, so a token is young for 20 s: in 40 s, the first call and the call after 20 s refresh.
  for (let call = 0; call < 40; call += 1) {
    await assert.rejects(clock.run(tab.user()), isApiError("invalid_token", 401));
    clock.advance(1000);
  }
  assert.deepEqual(server.received, ["refresh-1", "refresh-2"]);
  assert.ok(server.isLive);
});

test("fetch sends the access token, and repeats a request with its body after a 401", async () => {
  clock.advance(MINUTE);
  server.revokeAccessTokens();
  const response = await clock.run(tab.fetch("https://api.test/basket", { method: "POST", body: "apples" }));
  assert.equal(response.status, 200);
  assert.deepEqual(server.calls, ["POST /basket access-1-1", "POST /basket access-2-2"]);
});
