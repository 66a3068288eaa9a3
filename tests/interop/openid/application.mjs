// The web application around a library in JavaScript: its paths, the logins that have begun, and the session. It serves
// one user at a time, and keeps its data in the memory of one process.

import { createServer } from "node:http";

export const settings = {
  baseURL: process.env.BASE_URL,
  issuer: process.env.ISSUER,
  clientID: process.env.CLIENT_ID,
  clientSecret: process.env.CLIENT_SECRET,
  scope: process.env.SCOPES,
  redirectURI: `${process.env.BASE_URL}/callback`,
  postLogoutRedirectURI: `${process.env.BASE_URL}/signed-out`,
};

/** Answers requests with `respond`, which gets a URL and returns `{ status, location, body }`. */
export function listen(respond) {
  const server = createServer(async (request, response) => {
    let answer;
    try {
      answer = await respond(new URL(request.url, settings.baseURL), request);
    } catch (error) {
      console.error(error);
      answer = { status: 500, body: { error: String(error), cause: String(error.cause ?? "") } };
    }
    const { status = 200, location, cookies = [], body = {} } = answer;
    response.statusCode = location ? 303 : status;
    if (location) response.setHeader("location", location);
    if (cookies.length) response.setHeader("set-cookie", cookies);
    response.setHeader("content-type", "application/json");
    response.end(JSON.stringify(body));
  });
  server.listen(Number(process.env.LISTEN_PORT), process.env.LISTEN_HOST);
}

/**
 * Serves a library:
 * - `signIn()` returns `{ url, state, … }`;
 * - `callback(url, pending)` and `refresh(session)` return a session with `claims`, `access_token`, `refresh_token` and
 *   `id_token`;
 * - `userinfo(session)` returns claims;
 * - `signOut(session)` returns a URL.
 */
export function serve(library) {
  const pending = new Map();
  let session = null;
  listen(async url => {
    switch (url.pathname) {
      case "/sign-in": {
        const begun = await library.signIn();
        pending.set(begun.state, begun);
        return { location: begun.url.href };
      }
      case "/callback": {
        const begun = pending.get(url.searchParams.get("state"));
        if (!begun) return { status: 400, body: { error: "unknown state" } };
        pending.delete(begun.state);
        session = await library.callback(url, begun);
        return { location: "/" };
      }
      case "/signed-out":
        return { body: { signed_out: true } };
    }
    if (!session) return { status: 401, body: { error: "nobody is signed in" } };
    switch (url.pathname) {
      case "/":
        return { body: session };
      case "/refresh":
        session = await library.refresh(session);
        return { body: session };
      case "/userinfo":
        return { body: { claims: await library.userinfo(session) } };
      case "/sign-out": {
        const location = (await library.signOut(session)).href;
        session = null;
        return { location };
      }
      default:
        return { status: 404, body: { error: "not found" } };
    }
  });
}
