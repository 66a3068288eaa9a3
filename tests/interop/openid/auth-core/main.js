// A web application that signs in users with Auth.js (@auth/core), which keeps the session in an encrypted cookie. A
// Next.js application has the same configuration.

import { Auth, skipCSRFCheck } from "@auth/core";

import { listen, settings } from "../application.mjs";

const SECRET = "only-for-the-tests-only-for-the-tests";

/** Gets new tokens for the token of the session. */
async function refreshed(token) {
  const discovery = await (await fetch(`${settings.issuer}/.well-known/openid-configuration`)).json();
  const response = await fetch(discovery.token_endpoint, {
    method: "POST",
    body: new URLSearchParams({
      grant_type: "refresh_token",
      refresh_token: token.refresh_token,
      client_id: settings.clientID,
      client_secret: settings.clientSecret,
    }),
  });
  const tokens = await response.json();
  if (!response.ok) throw new Error(`the refresh was refused: ${JSON.stringify(tokens)}`);
  return { ...token, ...tokens };
}

const config = refresh => ({
  basePath: "/auth",
  trustHost: true,
  secret: SECRET,
  // The application is the only caller.
  skipCSRFCheck,
  providers: [{
    id: "latchkey",
    name: "Latchkey",
    type: "oidc",
    issuer: settings.issuer,
    clientId: settings.clientID,
    clientSecret: settings.clientSecret,
    authorization: { params: { scope: settings.scope } },
    checks: ["pkce", "state", "nonce"],
  }],
  callbacks: {
    async jwt({ token, account, profile }) {
      if (account) {
        const { access_token, refresh_token, id_token } = account;
        const { sub, email, name, groups } = profile;
        return { ...token, access_token, refresh_token, id_token, claims: { sub, email, name, groups } };
      }
      return refresh ? refreshed(token) : token;
    },
    session: ({ session, token }) =>
      ({ ...session, claims: token.claims, access_token: token.access_token, id_token: token.id_token }),
  },
});

/** Calls Auth.js. Returns its response. */
async function auth(path, { cookie, body, refresh = false } = {}) {
  const headers = new Headers();
  if (cookie) headers.set("cookie", cookie);
  const request = new Request(new URL(path, settings.baseURL), { method: body ? "POST" : "GET", headers, body });
  return Auth(request, config(refresh));
}

const cookiesOf = response => response.headers.getSetCookie();

/** The session of a browser, with new tokens if `refresh` is set. */
async function session(cookie, refresh) {
  const response = await auth("/auth/session", { cookie, refresh });
  const found = await response.json();
  if (!found?.claims) return { status: 401, body: { error: "nobody is signed in" } };
  return { body: found, cookies: cookiesOf(response) };
}

listen(async (url, request) => {
  const { cookie } = request.headers;
  switch (url.pathname) {
    case "/":
      return session(cookie, false);
    case "/refresh":
      return session(cookie, true);
    case "/sign-in": {
      const body = new URLSearchParams({ callbackUrl: `${settings.baseURL}/` });
      const response = await auth("/auth/signin/latchkey", { cookie, body });
      return { location: response.headers.get("location"), cookies: cookiesOf(response) };
    }
    case "/auth/callback/latchkey": {
      const response = await auth(url.href, { cookie });
      return { location: response.headers.get("location"), cookies: cookiesOf(response) };
    }
    case "/sign-out": {
      const { id_token } = (await session(cookie, false)).body;
      const response = await auth("/auth/signout", { cookie, body: new URLSearchParams() });
      const logout = new URL(`${settings.issuer}/logout`);
      logout.search = new URLSearchParams({
        id_token_hint: id_token,
        post_logout_redirect_uri: settings.postLogoutRedirectURI,
      });
      return { location: logout.href, cookies: cookiesOf(response) };
    }
    case "/signed-out":
      return { body: { signed_out: true } };
    default:
      return { status: 404, body: { error: "not found" } };
  }
});
