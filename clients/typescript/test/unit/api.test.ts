import assert from "node:assert/strict";
import { test } from "node:test";
import { ApiError, ConnectionError, createPkce, Latchkey, localStorageStore, NoSessionError } from "@latchkey/client";
import { error, isApiError, json } from "./harness.js";

/** Returns a client, and the requests that it has sent. `respond` answers each request. */
function clientWith(respond: (request: Request) => Response | Promise<Response>) {
  const requests: Request[] = [];
  const client = new Latchkey({
    url: "https://auth.test/base/",
    app: "shop",
    fetch: async (input, init) => {
      const request = new Request(input, init);
      requests.push(request.clone());
      return respond(request);
    },
  });
  return { client, requests };
}

const tokens = {
  access_token: "a",
  refresh_token: "r",
  session_id: "s",
  local_id: "u",
  expires_in: 900,
  expires_at: 1,
  token_type: "Bearer",
};

test("an error has the code, the fields, the request id and the time to wait", async () => {
  const fields = [{ field: "email", code: "invalid", message: "is not an email address" }];
  const body = { error: "invalid_request", error_description: "email is not an email address", fields, request_id: "1" };
  const { client } = clientWith(() => json(400, body, { "X-Request-Id": "2", "Retry-After": "3" }));
  await assert.rejects(client.register({ name: "Ada", email: "ada", password: "x" }), (thrown) => {
    assert.ok(thrown instanceof ApiError);
    assert.deepEqual(
      { ...thrown, message: thrown.message },
      {
        name: "ApiError",
        message: "email is not an email address",
        status: 400,
        code: "invalid_request",
        fields,
        requestId: "2",
        retryAfter: 3,
      },
    );
    return true;
  });
});

test("a response that is not from Latchkey is an error", async () => {
  for (const response of [
    () => new Response("<h1>Bad Gateway</h1>", { status: 502 }),
    () => new Response("<h1>Welcome</h1>", { status: 200 }),
    () => new Response("null", { status: 200 }),
    () => new Response("[]", { status: 404 }),
    () => new Response('{"error": 1}', { status: 500 }),
  ]) {
    const { client } = clientWith(response);
    await assert.rejects(client.jwks(), isApiError("unexpected_response", response().status));
  }
});

test("a missing response is a ConnectionError with its cause", async () => {
  const cause = new TypeError("fetch failed");
  const { client } = clientWith(() => Promise.reject(cause));
  await assert.rejects(client.jwks(), (thrown) => thrown instanceof ConnectionError && thrown.cause === cause);
});

test("a call ends after the timeout, or when the caller aborts it", async () => {
  const hang = ((_: unknown, init: RequestInit) =>
    new Promise((_resolve, reject) => {
      // Keeps Node alive, because the timer of AbortSignal.timeout does not.
      const alive = setTimeout(() => {}, 60_000);
      init.signal!.addEventListener("abort", () => {
        clearTimeout(alive);
        reject(init.signal!.reason as Error);
      });
    })) as typeof fetch;
  const client = new Latchkey({ url: "https://auth.test", app: "shop", timeout: 20, fetch: hang });
  await assert.rejects(client.jwks(), ConnectionError);
  const patient = new Latchkey({ url: "https://auth.test", app: "shop", fetch: hang });
  const aborted = new AbortController();
  const call = patient.request("get", "/{APPID}/.well-known/jwks.json", { signal: aborted.signal });
  aborted.abort(new Error("the page was left"));
  await assert.rejects(call, /the page was left/);
});

test("paths and queries are escaped, and the base URL can have a path", async () => {
  const { client, requests } = clientWith(() => json(200, { url: "https://provider.test" }));
  await client.socialRedirect("a/b", { state: "x&y", prompt: "login" });
  assert.equal(
    requests[0]?.url,
    "https://auth.test/base/shop/a%2Fb/redirect?state=x%26y&prompt=login&format=json",
  );
  assert.equal(client.socialLoginURL("github"), "https://auth.test/base/shop/github/redirect");
});

test("a call without a session is not sent", async () => {
  const { client, requests } = clientWith(() => json(200, {}));
  await assert.rejects(client.user(), NoSessionError);
  await client.logout();
  assert.equal(requests.length, 0);
});

test("a PKCE challenge is the SHA-256 of the verifier", async () => {
  const { verifier, challenge } = await createPkce();
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(verifier));
  assert.equal(challenge, Buffer.from(digest).toString("base64url"));
  assert.match(verifier, /^[\w-]{43}$/);
  assert.notEqual((await createPkce()).verifier, verifier);
});

test("a social login finishes with a code, or with tokens in the query or fragment", async () => {
  for (const url of [
    "https://shop.test/done?code=lkc_1&state=mine",
    "https://shop.test/done?access_token=a&refresh_token=r&session_id=s&local_id=u&expires_in=900&state=mine",
    "https://shop.test/done#access_token=a&refresh_token=r&session_id=s&local_id=u&expires_in=900&state=mine",
  ]) {
    const { client, requests } = clientWith(() => json(200, tokens));
    await client.finishSocialLogin(url, { state: "mine", codeVerifier: "verifier" });
    assert.deepEqual(await client.session.current(), { sessionId: "s", userId: "u" });
    assert.equal(await client.session.accessToken(), "a");
    assert.deepEqual(
      await Promise.all(requests.map((request) => request.json())),
      url.includes("code=") ? [{ grant_type: "authorization_code", code: "lkc_1", code_verifier: "verifier" }] : [],
    );
  }
});

test("a social login with a wrong state, an error or no result opens no session", async () => {
  const result = "refresh_token=r&access_token=a&session_id=s&local_id=u&expires_in=900";
  for (const [url, code] of [
    [`https://shop.test/done?${result}&state=other`, "invalid_state"],
    [`https://shop.test/done?${result}`, "invalid_state"],
    ["https://shop.test/done?error=access_denied&state=mine", "access_denied"],
    ["https://shop.test/done?state=mine", "invalid_request"],
  ] as const) {
    const { client, requests } = clientWith(() => json(200, tokens));
    await assert.rejects(client.finishSocialLogin(url, { state: "mine" }), isApiError(code, 400));
    assert.equal(await client.session.current(), null);
    assert.equal(requests.length, 0);
  }
});

test("a browser without localStorage keeps the session in memory", () => {
  const refuses = {
    get localStorage(): Storage {
      throw new Error("SecurityError");
    },
  };
  Object.defineProperties(globalThis, Object.getOwnPropertyDescriptors(refuses));
  const store = localStorageStore("shop");
  assert.equal(store.get(), null);
  void store.set("x");
  assert.equal(store.get(), "x");

  const values = new Map<string, string>();
  let isFull = false;
  const storage = {
    getItem: (key: string) => values.get(key) ?? null,
    setItem(key: string, value: string) {
      if (isFull) throw new Error("QuotaExceededError");
      values.set(key, value);
    },
  };
  Object.defineProperty(globalThis, "localStorage", { value: storage, configurable: true });
  void store.set("y");
  assert.equal(values.get("shop"), "y");
  isFull = true;
  void store.set("z");
  assert.equal(store.get(), "z");
});

test("the client has the types of the OpenAPI document", () => {
  const { client } = clientWith(() => error(404, "not_found"));
  const check = async () => {
    const name: string = (await client.user()).name;
    const current: boolean | undefined = (await client.sessions()).sessions[0]?.current;
    const events = (await client.request("get", "/v1/{APPID}/user/activity", { token: "t" })).events;
    // @ts-expect-error -- there is no such path
    void client.request("get", "/v1/{APPID}/nothing");
    // @ts-expect-error -- the path has no such method
    void client.request("delete", "/v1/{APPID}/email/login");
    // @ts-expect-error -- the body is missing
    void client.request("post", "/v1/{APPID}/email/login");
    // @ts-expect-error -- the body has no email address
    void client.login({ password: "x" });
    // @ts-expect-error -- the parameter of the path is missing
    void client.request("delete", "/v1/{APPID}/sessions/{SESSION}", { token: "t" });
    const path = { PROVIDER: "github" };
    // @ts-expect-error -- the parameter of the query is missing
    void client.request("get", "/{APPID}/{PROVIDER}/callback", { path });
    // @ts-expect-error -- the parameter of the query has no such value
    void client.request("get", "/{APPID}/{PROVIDER}/redirect", { path, query: { format: "xml" } });
    // @ts-expect-error -- there is no such code
    const isCode = new ApiError("", 400, "invalid_grant").code === "no_such_code";
    return { name, current, events, isCode };
  };
  assert.equal(typeof check, "function");
});
