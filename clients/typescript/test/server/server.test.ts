/**
 * Calls every endpoint of a real server. The environment has the addresses: LATCHKEY_URL, LATCHKEY_APP, LATCHKEY_INBOX,
 * LATCHKEY_PROVIDER (the port of the provider that this file starts) and LATCHKEY_CALLER (a ServiceAccount token).
 */

import assert from "node:assert/strict";
import { createServer, type IncomingMessage } from "node:http";
import { after, before, test } from "node:test";
import { ApiError, createPkce, Latchkey, memoryStore, NoSessionError, type Options } from "@latchkey/client";

const PASSWORD = "a quiet harbour at noon";
const NEW_PASSWORD = "a louder harbour at night";
const REDIRECT_URL = "http://127.0.0.1/done";
const TABS = 8;
const ROUNDS = 50;

function variable(name: string): string {
  const value = process.env[name];
  assert.ok(value, `${name} is not set`);
  return value;
}

function client(options: Partial<Options> = {}): Latchkey {
  return new Latchkey({ url: variable("LATCHKEY_URL"), app: variable("LATCHKEY_APP"), ...options });
}

interface Mail {
  id: number;
  text: string;
}

/** Returns the code in the first mail to this address after the mail with this id. */
async function mailedCode(email: string, after = 0): Promise<{ code: string; id: number }> {
  const query = new URLSearchParams({ to: email, after: String(after), wait: "30" });
  const response = await fetch(`${variable("LATCHKEY_INBOX")}/api/messages/latest?${query}`);
  assert.equal(response.status, 200, `a mail to ${email}`);
  const mail = (await response.json()) as Mail;
  const code = /\b[0-9A-Z]{5}-[0-9A-Z]{5}\b/.exec(mail.text)?.[0];
  assert.ok(code, mail.text);
  return { code, id: mail.id };
}

async function registered(email: string): Promise<Latchkey> {
  const latchkey = client();
  await latchkey.register({ name: "Ada", email, password: PASSWORD });
  await latchkey.confirm((await mailedCode(email)).code);
  return latchkey;
}

const rejectsWith = (code: ApiError["code"]) => (error: unknown) => error instanceof ApiError && error.code === code;

/** A provider at which Grace is logged in. The code and the token for her are `grace`. */
const provider = createServer((request, response) => {
  void (async () => {
    const respond = (status: number, body: object) =>
      response.writeHead(status, { "Content-Type": "application/json" }).end(JSON.stringify(body));
    const form = new URLSearchParams(await textOf(request));
    const [clientId] = atob(request.headers.authorization?.replace("Basic ", "") ?? "").split(":");
    const grace = { id: "1", email: "grace@example.com", email_verified: true, name: "Grace" };
    switch (request.url) {
      case "/token":
        if (form.get("code") !== "grace") return respond(400, { error: "invalid_grant" });
        return respond(200, { access_token: "grace", token_type: "Bearer" });
      case "/userinfo":
        return respond(200, grace);
      case "/introspect":
        return respond(200, { active: form.get("token") === "grace", client_id: clientId, sub: grace.id });
      default:
        return respond(404, {});
    }
  })().catch(() => response.destroy());
});

async function textOf(request: IncomingMessage): Promise<string> {
  request.setEncoding("utf8");
  let text = "";
  for await (const part of request) text += part as string;
  return text;
}

before(() => new Promise<void>((resolve) => provider.listen(Number(variable("LATCHKEY_PROVIDER")), "127.0.0.1", resolve)));
after(() => provider.close());

test("a user registers, confirms, logs in, resets the password and logs out", async () => {
  const email = "account@example.com";
  const latchkey = client();
  await assert.rejects(latchkey.register({ name: "", email: "x", password: PASSWORD }), (error) => {
    assert.ok(error instanceof ApiError);
    assert.equal(error.code, "invalid_request");
    assert.deepEqual(error.fields.map(({ field }) => field).sort(), ["email", "name"]);
    assert.ok(error.requestId);
    return true;
  });
  await latchkey.register({ name: "Ada", email, password: PASSWORD });
  await assert.rejects(latchkey.login({ email, password: "a wrong password here" }), rejectsWith("invalid_credentials"));
  await latchkey.login({ email, password: PASSWORD });
  const first = await mailedCode(email);
  await latchkey.verify();
  const { code, id } = await mailedCode(email, first.id);
  await assert.rejects(latchkey.confirm("00000-00000"), rejectsWith("invalid_code"));
  const confirmed = await latchkey.confirm(code);
  assert.deepEqual(await latchkey.session.current(), { sessionId: confirmed.session_id, userId: confirmed.local_id });
  assert.equal((await latchkey.user()).email_verified, true);

  await latchkey.forgotPassword(email);
  const reset = await mailedCode(email, id);
  await latchkey.confirmPassword({ email, code: reset.code, password: NEW_PASSWORD });
  const token = await latchkey.session.accessToken();
  await assert.rejects(latchkey.user(), rejectsWith("invalid_token"));

  await latchkey.login({ email, password: NEW_PASSWORD });
  assert.notEqual(await latchkey.session.accessToken(), token);
  const other = client();
  await other.login({ email, password: NEW_PASSWORD });
  await latchkey.logout();
  assert.equal(await latchkey.session.current(), null);
  assert.equal((await other.sessions()).sessions.length, 1);
});

test("a user manages the account and the sessions", async () => {
  const email = "manager@example.com";
  const latchkey = await registered(email);
  assert.equal((await latchkey.rename("Ada Lovelace")).name, "Ada Lovelace");
  assert.equal((await latchkey.user()).name, "Ada Lovelace");
  assert.equal((await latchkey.userInfo()).name, "Ada Lovelace");
  assert.ok((await latchkey.activity()).events.some(({ kind }) => kind === "renamed"));

  const others = [client(), client(), client()];
  for (const other of others) await other.login({ email, password: PASSWORD });
  assert.equal((await latchkey.sessions()).sessions.length, 4);
  await latchkey.endSession((await others[0]!.session.current())!.sessionId);
  await assert.rejects(others[0]!.user(), rejectsWith("invalid_token"));
  await others[1]!.revoke(await others[1]!.session.accessToken());
  await assert.rejects(others[1]!.user(), rejectsWith("invalid_token"));
  await latchkey.endOtherSessions();
  assert.equal((await latchkey.sessions()).sessions.length, 1);

  await latchkey.changePassword({ current_password: PASSWORD, password: NEW_PASSWORD });
  await client().login({ email, password: NEW_PASSWORD });
  await latchkey.changeEmail({ email: "changed@example.com", password: NEW_PASSWORD });
  await latchkey.confirm((await mailedCode("changed@example.com")).code);
  assert.equal((await latchkey.user()).email, "changed@example.com");
  await latchkey.deleteUser({ password: NEW_PASSWORD });
  assert.equal(await latchkey.session.current(), null);
  await assert.rejects(client().login({ email: "changed@example.com", password: NEW_PASSWORD }), rejectsWith("invalid_credentials"));
});

test("a user logs in with a provider, and links the identity", async () => {
  const latchkey = client();
  const { verifier, challenge } = await createPkce();
  const options = { redirect_url: REDIRECT_URL, state: "mine", code_challenge: challenge };
  const start = await fetch(latchkey.socialLoginURL("local", options), { redirect: "manual" });
  assert.equal(start.status, 302);
  const unknown = latchkey.socialRedirect("unknown");
  await assert.rejects(unknown, rejectsWith("provider_not_found"));
  const authorization = new URL((await latchkey.socialRedirect("local", options)).url);
  const callback = new URL(authorization.searchParams.get("redirect_uri")!);
  callback.searchParams.set("state", authorization.searchParams.get("state")!);
  callback.searchParams.set("code", "grace");
  const response = await fetch(callback, { redirect: "manual" });
  assert.equal(response.status, 302, await response.text());
  await latchkey.finishSocialLogin(response.headers.get("Location")!, { state: "mine", codeVerifier: verifier });
  assert.equal((await latchkey.user()).email, "grace@example.com");
  assert.deepEqual((await latchkey.identities()).identities.map(({ provider }) => provider), ["local"]);
  await assert.rejects(latchkey.unlinkIdentity("local"), rejectsWith("last_identity"));

  const mobile = client();
  await assert.rejects(mobile.socialLogin("local", { token: "wrong" }), rejectsWith("invalid_provider_token"));
  await mobile.socialLogin("local", { token: "grace" });
  assert.equal((await mobile.session.current())?.userId, (await latchkey.session.current())?.userId);
  await mobile.changePassword({ password: NEW_PASSWORD });
  await mobile.unlinkIdentity("local");
  assert.deepEqual((await mobile.identities()).identities, []);
  await mobile.linkIdentity("local", { token: "grace" });
  assert.equal((await mobile.identities()).identities.length, 1);
});

test("a service introspects tokens and reads the metadata", async () => {
  const latchkey = await registered("introspected@example.com");
  const token = await latchkey.session.accessToken();
  const caller = variable("LATCHKEY_CALLER");
  const active = await latchkey.introspect(token, caller);
  assert.equal(active.active, true);
  assert.equal(active.sid, (await latchkey.session.current())?.sessionId);
  assert.deepEqual(await latchkey.introspect("x", caller), { active: false });
  await assert.rejects(latchkey.introspect(token, token), rejectsWith("invalid_client"));

  const { issuer, jwks_uri } = await latchkey.openIdConfiguration();
  assert.deepEqual(await latchkey.jwks(), await (await fetch(jwks_uri)).json());
  assert.equal((await latchkey.authorizationServerMetadata()).issuer, issuer);
  const metadata = await latchkey.request("get", "/.well-known/oauth-authorization-server/{APPID}");
  assert.equal(metadata.issuer, issuer);
  assert.ok("paths" in (await latchkey.request("get", "/openapi.json")));
});

test("eight clients with one store refresh with lost answers, and keep the session", async (t) => {
  const email = "racer@example.com";
  await registered(email);
  const store = memoryStore();
  const counts = { requests: 0, lost: 0 };
  let now = Date.now();
  const tabs = Array.from({ length: TABS }, () =>
    client({
      store,
      clock: {
        now: () => now,
        sleep: () => new Promise((resolve) => setTimeout(() => resolve(void (now += 1000)), 1)),
      },
      fetch: async (input, init) => {
        const response = await fetch(input, init);
        counts.requests += 1;
        if (!String(input).endsWith("/token") || Math.random() > 0.3) return response;
        counts.lost += 1;
        throw new TypeError("lost");
      },
    }),
  );
  await tabs[0]!.login({ email, password: PASSWORD });
  const session = await tabs[0]!.session.current();
  for (let round = 0; round < ROUNDS; round += 1) {
    now += 900_000;
    await Promise.all(tabs.map((tab) => tab.session.accessToken()));
  }
  for (const tab of tabs) {
    await tab.user();
    assert.deepEqual(await tab.session.current(), session);
  }
  t.diagnostic(`${counts.requests} requests, ${counts.lost} lost answers`);
  assert.ok(counts.lost > ROUNDS);
});

test("a session that has ended at the server also ends in the client", async () => {
  const email = "ended@example.com";
  let now = Date.now();
  const latchkey = client({ clock: { now: () => now, sleep: () => Promise.reject(new Error("no refresh is repeated")) } });
  await latchkey.register({ name: "Ada", email, password: PASSWORD });
  await latchkey.confirm((await mailedCode(email)).code);
  await latchkey.revoke(await latchkey.session.accessToken());
  await assert.rejects(latchkey.user(), rejectsWith("invalid_token"));
  now += 60_000;
  await assert.rejects(latchkey.user(), NoSessionError);
  assert.equal(await latchkey.session.current(), null);
});
