import { ApiError, Latchkey, type Clock, type Options, type SessionStore } from "@latchkey/client";

export const LIFETIME = 900;
const GRACE = 30_000;

/** A clock that moves only when a test moves it, or when every task waits for it. */
export class VirtualClock implements Clock {
  #now = 1_800_000_000_000;
  #timers: { at: number; wake: () => void }[] = [];

  now = (): number => this.#now;

  sleep = (milliseconds: number): Promise<void> =>
    new Promise((wake) => this.#timers.push({ at: this.#now + milliseconds, wake }));

  advance(milliseconds: number): void {
    this.#now += milliseconds;
  }

  /** Moves the clock from timer to timer until the promise is settled. */
  async run<T>(promise: Promise<T>): Promise<T> {
    let isSettled = false;
    const settled = () => void (isSettled = true);
    promise.then(settled, settled);
    for (;;) {
      // Everything that does not wait for the clock runs before the next timer.
      await new Promise(setImmediate);
      if (isSettled) return promise;
      const [next] = this.#timers.sort((one, other) => one.at - other.at).splice(0, 1);
      if (!next) throw new Error("nothing wakes the promise up");
      this.#now = Math.max(this.#now, next.at);
      next.wake();
    }
  }
}

export type Fate = "answer" | "lose" | "unreachable" | Response | ((handle: () => Response) => Promise<Response>);

/** A server with one session, which follows the rules of docs/specification/sessions.md. */
export class FakeServer {
  /** What happens to each of the next refreshes. After these, the server answers every refresh. */
  fates: Fate[] = [];
  /** The refresh tokens that the server received. */
  received: string[] = [];
  /** The calls of other endpoints: method, path and Bearer token. */
  calls: string[] = [];
  generation = 1;
  isLive = true;
  /** Rejects every access token. */
  rejectsAccessTokens = false;
  #logins = 0;
  #issuedAt: number;
  #issued = 0;
  #lateRefreshes: number[] = [];
  #lateness = 0;
  #validAccessTokens = new Set<string>();

  constructor(readonly clock: VirtualClock) {
    this.#issuedAt = clock.now();
  }

  client(options: Partial<Options> = {}): Latchkey {
    return new Latchkey({ url: "https://auth.test", app: "shop", clock: this.clock, fetch: this.fetch, ...options });
  }

  fetch = async (input: RequestInfo | URL, init?: RequestInit): Promise<Response> => {
    const request = new Request(input, init);
    const { pathname } = new URL(request.url);
    if (pathname.endsWith("/email/login")) return this.#login();
    if (!pathname.endsWith("/token")) return this.#call(request);
    const { refresh_token: token } = (await request.json()) as { refresh_token: string };
    const fate = this.fates.shift() ?? "answer";
    if (fate === "unreachable") throw new TypeError("fetch failed");
    if (fate instanceof Response) return fate;
    if (typeof fate === "function") return fate(() => this.#refresh(token));
    const response = this.#refresh(token);
    if (fate === "lose") throw new TypeError("fetch failed");
    return response;
  };

  #login(): Response {
    this.#logins += 1;
    this.generation = 1;
    this.isLive = true;
    const tokens = this.#tokens();
    return json(200, { ...tokens, token: tokens.access_token, user: { id: "user", email: "ada@example.com", name: "Ada" } });
  }

  #refresh(token: string): Response {
    this.received.push(token);
    const generation = Number(token.slice("refresh-".length));
    const now = this.clock.now();
    if (!this.isLive) return invalidGrant();
    if (generation === this.generation) {
      this.generation += 1;
      this.#issuedAt = now;
      this.#lateness = Math.max(0, this.#lateness - 1);
    } else if (generation !== this.generation - 1 || !this.#acceptPrevious(now)) {
      this.isLive = false;
      return invalidGrant();
    }
    return json(200, this.#tokens());
  }

  /** Whether the previous refresh token is still accepted, in the grace period or as a late refresh. */
  #acceptPrevious(now: number): boolean {
    if (now <= this.#issuedAt + GRACE) return true;
    this.#lateRefreshes = this.#lateRefreshes.filter((at) => at > now - 24 * 3_600_000);
    if (this.#lateRefreshes.length >= 5 || this.#lateness + 2 > 14) return false;
    this.#lateRefreshes.push(now);
    this.#lateness += 2;
    this.#issuedAt = now;
    return true;
  }

  #tokens() {
    const access = `access-${this.generation}-${(this.#issued += 1)}`;
    this.#validAccessTokens.add(access);
    return {
      access_token: access,
      refresh_token: `refresh-${this.generation}`,
      token_type: "Bearer",
      expires_in: LIFETIME,
      expires_at: Math.floor(this.clock.now() / 1000) + LIFETIME,
      session_id: `session-${this.#logins}`,
      local_id: "user",
    };
  }

  #call(request: Request): Response {
    const token = request.headers.get("Authorization")?.slice("Bearer ".length) ?? "";
    this.calls.push(`${request.method} ${new URL(request.url).pathname} ${token}`);
    if (request.url.endsWith("/revoke")) {
      this.isLive = false;
      return json(200, {});
    }
    const isAccepted = this.isLive && !this.rejectsAccessTokens && this.#validAccessTokens.has(token);
    return isAccepted ? json(200, { id: "user" }) : error(401, "invalid_token");
  }

  /** From now on the server rejects the access tokens that it has issued. */
  revokeAccessTokens(): void {
    this.#validAccessTokens.clear();
  }
}

export function json(status: number, body: unknown, headers: Record<string, string> = {}): Response {
  return new Response(JSON.stringify(body), { status, headers: { "Content-Type": "application/json", ...headers } });
}

export function error(status: number, code: string, headers: Record<string, string> = {}): Response {
  return json(status, { error: code, error_description: "…", request_id: "id" }, headers);
}

export function invalidGrant(): Response {
  return error(400, "invalid_grant");
}

/** A store of several clients, without delays, that counts writes. */
export function sharedStore(): SessionStore & { value: string | null; writes: number; changed: Set<() => void> } {
  return {
    value: null,
    writes: 0,
    changed: new Set(),
    get() {
      return this.value;
    },
    set(value) {
      this.writes += 1;
      this.value = value;
      for (const changed of this.changed) changed();
    },
    subscribe(changed) {
      this.changed.add(changed);
      return () => this.changed.delete(changed);
    },
  };
}

export const credentials = { email: "ada@example.com", password: "a quiet harbour at noon" };

export function isApiError(code: string, status: number): (error: unknown) => boolean {
  return (error) => error instanceof ApiError && error.code === code && error.status === status;
}

