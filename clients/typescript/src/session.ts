import { ApiError, ConnectionError, NoSessionError } from "./errors.js";
import type { SessionStore } from "./store.js";

/** How long a call waits for a refresh to succeed, in milliseconds: the default of the App's grace period. */
const MAX_WAIT = 30_000;
/** The delay before the first repetition, in milliseconds. Each failure doubles it. */
const FIRST_DELAY = 500;
const MAX_DELAY = 10_000;

/** The tokens of a response that opens or continues a session. */
export interface Tokens {
  access_token: string;
  refresh_token: string;
  session_id: string;
  local_id: string;
  /** The lifetime of the access token in seconds. */
  expires_in: number;
}

export interface SessionInfo {
  sessionId: string;
  userId: string;
}

export interface Clock {
  /** Unix time in milliseconds. */
  now(): number;
  sleep(milliseconds: number): Promise<void>;
}

/** The content of the store, as JSON. All times are Unix times in milliseconds. */
interface Entry extends SessionInfo {
  /** When the application opened the session. */
  openedAt: number;
  /** The number of refreshes since the session was opened; `ENDED` after the end of the session. */
  generation: number;
  accessToken: string;
  refreshToken: string;
  issuedAt: number;
  expiresAt: number;
}

const ENDED = Number.MAX_SAFE_INTEGER;

/** After a failed refresh, no refresh is sent before `until`. */
interface Pause {
  until: number;
  failures: number;
  error: unknown;
}

/** Keeps the tokens of a session, and refreshes them when they are needed. */
export class Session {
  readonly #exchange: (refreshToken: string) => Promise<Tokens>;
  readonly #store: SessionStore;
  readonly #clock: Clock;
  readonly #minAge: number;
  readonly #listeners = new Set<(session: SessionInfo | null) => void>();
  #held: Entry | null = null;
  /** The id of the session at the last call of `#report`; undefined before the first call. */
  #reported: string | null | undefined;
  /** The refreshes that are under way, by the rejected access token. */
  readonly #refreshing = new Map<string | undefined, Promise<string>>();
  #pause: Pause | undefined;

  /** @param timeout Limit for a call of `exchange`, in milliseconds. */
  constructor(
    exchange: (refreshToken: string) => Promise<Tokens>,
    store: SessionStore,
    clock: Clock,
    timeout: number,
  ) {
    this.#exchange = exchange;
    this.#store = store;
    this.#clock = clock;
    // A refresh takes at most one timeout. Until its response arrives, another tab can send the same refresh token,
    // and that request takes at most one timeout, too.
    this.#minAge = 2 * timeout;
  }

  /** Returns the session, or null if nobody is logged in. */
  async current(): Promise<SessionInfo | null> {
    return infoOf(await this.#read());
  }

  /**
   * Returns a valid access token. Refreshes it shortly before it expires.
   *
   * Throws a `NoSessionError` if there is no session. Throws another error if the tokens cannot be refreshed now; the
   * session continues.
   */
  async accessToken(): Promise<string> {
    return this.#refreshOnce();
  }

  /**
   * Replaces an access token that was rejected. Returns another access token.
   *
   * Returns `rejected` if this token is younger than twice the timeout: a new token would be rejected, too. Without
   * this limit, an API that rejects every token would make each tab refresh without a pause. A refresh token that a
   * tab has just sent could then arrive after two newer refresh tokens, and the server would treat it as stolen.
   */
  async refresh(rejected: string): Promise<string> {
    return this.#refreshOnce(rejected);
  }

  /** Stores the tokens of a new session, or new tokens of the same session. */
  async open(tokens: Tokens): Promise<void> {
    const stored = parse(await this.#store.get());
    const openedAt = Math.max(this.#clock.now(), 1 + Math.max(stored?.openedAt ?? 0, this.#held?.openedAt ?? 0));
    this.#pause = undefined;
    this.#held = entryOf(tokens, { openedAt, generation: 0, sentAt: this.#clock.now() });
    await this.#store.set(JSON.stringify(this.#held));
    this.#reported ??= null;
    this.#report();
  }

  /** Forgets the session, in all tabs. Returns its refresh token. The session continues at the server. */
  async close(): Promise<string | undefined> {
    const entry = await this.#read();
    if (entry) await this.#end(entry);
    return entry?.refreshToken;
  }

  /** Calls the listener after each login and each end of a session, in any tab. Returns a function that removes it. */
  onChange(listener: (session: SessionInfo | null) => void): () => void {
    this.#listeners.add(listener);
    const read = () => void this.#read().catch(() => {});
    const unsubscribe = this.#store.subscribe?.(read);
    read();
    return () => {
      this.#listeners.delete(listener);
      unsubscribe?.();
    };
  }

  #isYoung({ issuedAt }: Entry, now: number): boolean {
    return issuedAt <= now && now < issuedAt + this.#minAge;
  }

  #refreshOnce(rejected?: string): Promise<string> {
    let refreshing = this.#refreshing.get(rejected);
    if (!refreshing) {
      refreshing = this.#refresh(rejected).finally(() => this.#refreshing.delete(rejected));
      this.#refreshing.set(rejected, refreshing);
    }
    return refreshing;
  }

  async #refresh(rejected?: string): Promise<string> {
    const deadline = this.#clock.now() + MAX_WAIT;
    for (;;) {
      const entry = await this.#read();
      if (!entry) throw new NoSessionError();
      const now = this.#clock.now();
      const isRejected = entry.accessToken === rejected;
      if (isRejected ? this.#isYoung(entry, now) : now < refreshAt(entry)) return entry.accessToken;
      if (!this.#pause || now >= this.#pause.until) {
        try {
          const tokens = await this.#exchange(entry.refreshToken);
          this.#pause = undefined;
          const next = entryOf(tokens, { ...entry, generation: entry.generation + 1, sentAt: now });
          if ((await this.#merge(next)) === next) return next.accessToken;
          continue;
        } catch (error) {
          if (error instanceof ApiError && error.code === "invalid_grant") {
            // Another tab can have stored newer tokens in the meantime.
            if ((await this.#read())?.refreshToken === entry.refreshToken) await this.#end(entry);
            continue;
          }
          this.#pause = this.#pauseAfter(error);
        }
      }
      const { until, error } = this.#pause;
      if (!isRejected && this.#clock.now() < entry.expiresAt) return entry.accessToken;
      if (!isTemporary(error) || until > deadline) throw error;
      await this.#clock.sleep(Math.max(0, until - this.#clock.now()));
    }
  }

  #pauseAfter(error: unknown): Pause {
    const failures = (this.#pause?.failures ?? 0) + 1;
    const backoff = Math.min(MAX_DELAY, FIRST_DELAY * 2 ** (failures - 1));
    const retryAfter = (error instanceof ApiError && error.retryAfter) || 0;
    const delay = Math.max(retryAfter * 1000, backoff * (0.5 + Math.random() / 2));
    return { until: this.#clock.now() + delay, failures, error };
  }

  async #end(entry: Entry): Promise<void> {
    await this.#merge({ ...entry, generation: ENDED, accessToken: "", refreshToken: "" });
  }

  /** Stores the entry, unless the store has a newer one. Returns the newer of both, or null if the session has ended. */
  async #merge(entry: Entry): Promise<Entry | null> {
    if (!this.#held || isNewer(entry, this.#held)) this.#held = entry;
    return this.#read();
  }

  /**
   * Returns the newer of two entries: that in memory (`#held`), and that in the store. Returns null if the session has
   * ended, or if the store is empty.
   *
   * Stores and browsers have no lock, so another tab can overwrite a newer entry. A tab that holds a newer entry than
   * the store writes its entry again.
   */
  async #read(): Promise<Entry | null> {
    const before = this.#held;
    const stored = parse(await this.#store.get());
    if (!stored) {
      if (this.#held === before) this.#held = null;
    } else if (this.#held && isNewer(this.#held, stored)) {
      await this.#store.set(JSON.stringify(this.#held));
    } else {
      this.#held = stored;
    }
    this.#report();
    return this.#live();
  }

  #live(): Entry | null {
    return this.#held && this.#held.generation !== ENDED ? this.#held : null;
  }

  #report(): void {
    const session = infoOf(this.#live());
    const id = session?.sessionId ?? null;
    const isChanged = this.#reported !== undefined && this.#reported !== id;
    this.#reported = id;
    if (!isChanged) return;
    for (const listener of this.#listeners) queueMicrotask(() => listener(session));
  }
}

function entryOf(
  tokens: Tokens,
  { openedAt, generation, sentAt }: { openedAt: number; generation: number; sentAt: number },
): Entry {
  return {
    openedAt,
    generation,
    sessionId: tokens.session_id,
    userId: tokens.local_id,
    accessToken: tokens.access_token,
    refreshToken: tokens.refresh_token,
    issuedAt: sentAt,
    expiresAt: sentAt + tokens.expires_in * 1000,
  };
}

function infoOf(entry: Entry | null): SessionInfo | null {
  return entry && { sessionId: entry.sessionId, userId: entry.userId };
}

function parse(text: string | null): Entry | null {
  try {
    const entry = JSON.parse(text ?? "null") as Entry | null;
    return typeof entry?.openedAt === "number" ? entry : null;
  } catch {
    return null;
  }
}

/**
 * Whether `one` has newer tokens than `other`.
 *
 * The server replaces refresh token n by refresh token n+1, whichever tab sends it. So tabs that count refreshes agree
 * on the numbers, and the tokens stay opaque.
 */
function isNewer(one: Entry, other: Entry): boolean {
  if (one.openedAt !== other.openedAt) return one.openedAt > other.openedAt;
  if (one.sessionId !== other.sessionId) return one.sessionId > other.sessionId;
  if (one.generation !== other.generation) return one.generation > other.generation;
  return one.expiresAt > other.expiresAt;
}

/** Returns when to refresh: a minute before the access token expires, or a fifth of its lifetime if that is shorter. */
function refreshAt({ issuedAt, expiresAt }: Entry): number {
  return expiresAt - Math.min(60_000, (expiresAt - issuedAt) / 5);
}

/** Whether the same request can succeed later. */
function isTemporary(error: unknown): boolean {
  if (!(error instanceof ApiError)) return error instanceof ConnectionError;
  const { status, code } = error;
  return status >= 500 || status === 429 || status === 408 || code === "unexpected_response";
}
