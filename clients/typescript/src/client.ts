import { ApiError, NoSessionError } from "./errors.js";
import {
  DEFAULT_TIMEOUT,
  request,
  urlOf,
  type MethodOf,
  type Path,
  type RequestArguments,
  type RequestOptions,
  type ResponseOf,
  type Schemas,
  type Transport,
} from "./request.js";
import { Session, type Clock, type Tokens } from "./session.js";
import { memoryStore, type SessionStore } from "./store.js";

export interface Options extends Transport {
  /** Where the session is stored. Default: in memory. */
  store?: SessionStore;
  /** Replaces the clock, for tests. */
  clock?: Clock;
}

export interface RedirectOptions {
  /** The URL to which the user returns. It must be in `redirectURLs` of the App. */
  redirect_url?: string;
  /** A random value that `finishSocialLogin` compares. */
  state?: string;
  /** The challenge from `createPkce`. */
  code_challenge?: string;
  prompt?: string;
  login_hint?: string;
}

const systemClock: Clock = {
  now: Date.now,
  sleep: (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds)),
};

/** The client of one App. Methods throw `ApiError`, `ConnectionError` or `NoSessionError`. */
export class Latchkey {
  readonly session: Session;
  readonly #transport: Transport;

  constructor({ store = memoryStore(), clock = systemClock, ...transport }: Options) {
    this.#transport = transport;
    this.session = new Session((token) => this.refresh(token), store, clock, transport.timeout ?? DEFAULT_TIMEOUT);
  }

  /** Calls an operation of the OpenAPI document. `options.token` is the Bearer token. */
  request<P extends Path, M extends MethodOf<P>>(
    method: M,
    path: P,
    ...options: RequestArguments<P, M>
  ): Promise<ResponseOf<P, M>> {
    return request(this.#transport, method, path, ...options);
  }

  /** Calls an operation with the access token of the session. If the token is rejected, refreshes it and repeats the call. */
  async authenticatedRequest<P extends Path, M extends MethodOf<P>>(
    method: M,
    path: P,
    ...[options]: RequestArguments<P, M>
  ): Promise<ResponseOf<P, M>> {
    const send = (token: string) => this.request(method, path, { ...options, token } as RequestOptions<P, M>);
    const token = await this.session.accessToken();
    try {
      return await send(token);
    } catch (error) {
      if (!(error instanceof ApiError && error.code === "invalid_token")) throw error;
      const next = await this.session.refresh(token);
      if (next === token) throw error;
      return send(next);
    }
  }

  /**
   * Calls your own backend with the access token. If the response is 401, refreshes the token and repeats the call.
   * Pass only URLs of servers that are allowed to receive the token.
   */
  async fetch(input: RequestInfo | URL, init?: RequestInit): Promise<Response> {
    const original = new Request(input, init);
    const send = (token: string) => {
      const request = original.clone();
      request.headers.set("Authorization", `Bearer ${token}`);
      return (this.#transport.fetch ?? fetch)(request);
    };
    const token = await this.session.accessToken();
    const response = await send(token);
    if (response.status !== 401) return response;
    const next = await this.session.refresh(token);
    return next === token ? response : send(next);
  }

  register(body: Schemas["RegisterRequest"]) {
    return this.request("post", "/v1/{APPID}/email/register", { body });
  }

  /** Confirms an email address, and logs the user in. */
  async confirm(code: string) {
    const token = await this.session.accessToken().catch((error: unknown) => {
      if (error instanceof NoSessionError) return undefined;
      throw error;
    });
    const body = { code };
    const response = await this.request("post", "/v1/{APPID}/email/confirm", token ? { body, token } : { body });
    await this.session.open(response);
    return response;
  }

  /** Requests another mail with the confirmation code. */
  verify() {
    return this.authenticatedRequest("post", "/v1/{APPID}/email/verify");
  }

  async login(body: Schemas["LoginRequest"]) {
    const response = await this.request("post", "/v1/{APPID}/email/login", { body });
    await this.session.open({ ...response, access_token: response.token, local_id: response.user.id });
    return response;
  }

  forgotPassword(email: string) {
    return this.request("post", "/v1/{APPID}/email/forgot-password", { body: { email } });
  }

  /** Sets a new password with the code from the email. All sessions of the user end. */
  confirmPassword(body: Schemas["ConfirmPasswordRequest"]) {
    return this.request("post", "/v1/{APPID}/email/confirm-password", { body });
  }

  /** Exchanges a refresh token. The session does this automatically; use this method only for tokens that you store. */
  async refresh(refreshToken: string): Promise<Schemas["TokenResponse"]> {
    const body = { refresh_token: refreshToken };
    // The endpoint has another type of response only for OpenID Connect clients, which send a form and not JSON.
    const response = (await this.request("post", "/v1/{APPID}/token", { body })) as Schemas["TokenResponse"];
    if (typeof response.refresh_token !== "string") {
      throw new ApiError("the response has no tokens", 200, "unexpected_response");
    }
    return response;
  }

  /** Exchanges the one-time code of a social login, and logs the user in. */
  async exchangeCode(code: string, codeVerifier: string) {
    const body = { grant_type: "authorization_code", code, code_verifier: codeVerifier };
    const response = (await this.request("post", "/v1/{APPID}/token", { body })) as Schemas["TokenResponse"];
    await this.session.open(response);
    return response;
  }

  /** Ends the session of a refresh token or access token. */
  revoke(token: string) {
    return this.request("post", "/v1/{APPID}/revoke", { body: { token } });
  }

  /** Ends the session. If the call fails, the tabs have forgotten the session, but it continues at the server. */
  async logout() {
    const token = await this.session.close();
    if (token !== undefined) await this.revoke(token);
  }

  sessions() {
    return this.authenticatedRequest("get", "/v1/{APPID}/sessions");
  }

  endSession(id: string) {
    return this.authenticatedRequest("delete", "/v1/{APPID}/sessions/{SESSION}", { path: { SESSION: id } });
  }

  endOtherSessions() {
    return this.authenticatedRequest("delete", "/v1/{APPID}/sessions");
  }

  user() {
    return this.authenticatedRequest("get", "/v1/{APPID}/user");
  }

  rename(name: string) {
    return this.authenticatedRequest("patch", "/v1/{APPID}/user", { body: { name } });
  }

  changePassword(body: Schemas["ChangePasswordRequest"]) {
    return this.authenticatedRequest("post", "/v1/{APPID}/user/password", { body });
  }

  /** Mails a code to the new address. `confirm` with this code changes the address. */
  changeEmail(body: Schemas["ChangeAddressRequest"]) {
    return this.authenticatedRequest("post", "/v1/{APPID}/user/email", { body });
  }

  async deleteUser(body: Schemas["DeleteUserRequest"] = {}) {
    const response = await this.authenticatedRequest("delete", "/v1/{APPID}/user", { body });
    await this.session.close();
    return response;
  }

  activity() {
    return this.authenticatedRequest("get", "/v1/{APPID}/user/activity");
  }

  userInfo() {
    return this.authenticatedRequest("get", "/v1/{APPID}/userinfo");
  }

  identities() {
    return this.authenticatedRequest("get", "/v1/{APPID}/user/identities");
  }

  linkIdentity(provider: string, body: Schemas["ProviderTokenRequest"]) {
    const path = { PROVIDER: provider };
    return this.authenticatedRequest("post", "/v1/{APPID}/user/identities/{PROVIDER}", { path, body });
  }

  unlinkIdentity(provider: string) {
    const path = { PROVIDER: provider };
    return this.authenticatedRequest("delete", "/v1/{APPID}/user/identities/{PROVIDER}", { path });
  }

  /** Logs the user in with a token that the application has got from the provider. */
  async socialLogin(provider: string, body: Schemas["ProviderTokenRequest"]) {
    const path = { PROVIDER: provider };
    const response = await this.request("post", "/{APPID}/{PROVIDER}/login", { path, body });
    await this.session.open(response);
    return response;
  }

  /** Returns the URL that a page opens to start a social login. */
  socialLoginURL(provider: string, options: RedirectOptions = {}): string {
    return urlOf(this.#transport, "/{APPID}/{PROVIDER}/redirect", { path: { PROVIDER: provider }, query: options });
  }

  /** Starts a social login without a redirect, and returns the URL of the provider. */
  socialRedirect(provider: string, options: RedirectOptions = {}) {
    const path = { PROVIDER: provider };
    const query = { ...options, format: "json" as const };
    return this.request("get", "/{APPID}/{PROVIDER}/redirect", { path, query, credentials: "include" });
  }

  /**
   * Logs the user in with the result of a social login.
   *
   * @param url The URL to which the user returned, with the parameters that Latchkey added.
   * @param expected The `state` and the verifier with which the login was started.
   */
  async finishSocialLogin(url: string | URL, expected: { state?: string; codeVerifier?: string } = {}) {
    const { searchParams, hash } = new URL(url);
    const result = new Map([...searchParams, ...new URLSearchParams(hash.slice(1))]);
    if (result.get("state") !== expected.state) {
      throw new ApiError("the state is not that of this login", 400, "invalid_state");
    }
    const error = result.get("error");
    if (error !== undefined) {
      throw new ApiError(result.get("error_description") ?? error, 400, error as Schemas["ErrorCode"]);
    }
    const code = result.get("code");
    if (code !== undefined) {
      await this.exchangeCode(code, expected.codeVerifier ?? "");
      return;
    }
    if (!result.has("refresh_token")) {
      throw new ApiError("the URL has no result of a login", 400, "invalid_request");
    }
    const tokens = { ...Object.fromEntries(result), expires_in: Number(result.get("expires_in")) };
    await this.session.open(tokens as unknown as Tokens);
  }

  /** Reports whether a token is valid. `serviceAccountToken` is the token of a ServiceAccount that the App lists. */
  introspect(token: string, serviceAccountToken: string) {
    return this.request("post", "/v1/{APPID}/introspect", { body: { token }, token: serviceAccountToken });
  }

  jwks() {
    return this.request("get", "/{APPID}/.well-known/jwks.json");
  }

  openIdConfiguration() {
    return this.request("get", "/{APPID}/.well-known/openid-configuration");
  }

  authorizationServerMetadata() {
    return this.request("get", "/{APPID}/.well-known/oauth-authorization-server");
  }
}

/** Creates a verifier for `finishSocialLogin`, and its challenge for the start of the login (RFC 7636). */
export async function createPkce(): Promise<{ verifier: string; challenge: string }> {
  const verifier = base64url(crypto.getRandomValues(new Uint8Array(32)));
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(verifier));
  return { verifier, challenge: base64url(new Uint8Array(digest)) };
}

function base64url(bytes: Uint8Array): string {
  return btoa(String.fromCharCode(...bytes))
    .replace(/\+/g, "-")
    .replace(/\//g, "_")
    .replace(/=+$/, "");
}
