import assert from "node:assert/strict";
import { test } from "node:test";
import type { SessionStore } from "@latchkey/client";
import { credentials, error, FakeServer, LIFETIME, VirtualClock, type Fate } from "./harness.js";

const TABS = 8;
const HOURS = 12;
const SEEDS = 12;

/** A generator of numbers from 0 to 1 that returns the same numbers for the same seed (xorshift32). */
function randomFrom(seed: number): () => number {
  let state = seed * 2_654_435_761 || 1;
  return () => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return (state >>> 0) / 2 ** 32;
  };
}

interface View {
  value: string | null;
  /** The number of this tab's writes that have not been reported to the other tabs yet. */
  pending: number;
  lastWrite: number;
  changed: Set<() => void>;
}

/**
 * localStorage of a browser with one process for each tab: a tab sees its own writes immediately, and the writes of
 * other tabs later. Until a write of a tab is reported to the other tabs, the tab ignores their writes.
 */
class DelayedStorage {
  value: string | null = null;
  /** How often a write replaced newer tokens by older ones. */
  regressions = 0;
  readonly #views: View[] = [];
  #lastReport = 0;

  constructor(
    readonly clock: VirtualClock,
    readonly delay: () => number,
  ) {}

  view(): SessionStore {
    const view: View = { value: this.value, pending: 0, lastWrite: 0, changed: new Set() };
    this.#views.push(view);
    return {
      get: () => view.value,
      set: (value) => {
        view.value = value;
        view.pending += 1;
        void this.#commit(view, value);
      },
      subscribe: (changed) => {
        view.changed.add(changed);
        return () => view.changed.delete(changed);
      },
    };
  }

  /** Writes of one tab, and reports of changes to one tab, stay in order. */
  async #commit(writer: View, value: string): Promise<void> {
    writer.lastWrite = Math.max(writer.lastWrite, this.clock.now() + this.delay());
    await this.clock.sleep(writer.lastWrite - this.clock.now());
    if (generationOf(value) < generationOf(this.value)) this.regressions += 1;
    this.value = value;
    this.#lastReport = Math.max(this.#lastReport, this.clock.now() + this.delay());
    await this.clock.sleep(this.#lastReport - this.clock.now());
    for (const view of this.#views) {
      if (view === writer) view.pending -= 1;
      else if (view.pending === 0) {
        view.value = value;
        for (const changed of view.changed) changed();
      }
    }
  }
}

function generationOf(value: string | null): number {
  return value === null ? 0 : (JSON.parse(value) as { generation: number }).generation;
}

test("tabs that race, lose answers and get them late keep the session", async (t) => {
  let [refreshes, lost, late, regressions] = [0, 0, 0, 0];
  for (let seed = 1; seed <= SEEDS; seed += 1) {
    const random = randomFrom(seed);
    t.mock.method(Math, "random", random);
    const clock = new VirtualClock();
    const server = new FakeServer(clock);
    const storage = new DelayedStorage(clock, () => random() * 1000);
    let answered = 0;
    const end = clock.now() + HOURS * 3_600_000;
    const fate = (): Fate => {
      const draw = random();
      const delay = random() * 5000;
      if (draw < 0.1) return error(503, "temporarily_unavailable", { "Retry-After": "5" });
      return async (handle) => {
        await clock.sleep(delay);
        if (draw < 0.15) throw new TypeError("fetch failed");
        const response = handle();
        refreshes += 1;
        if (draw < 0.35) {
          lost += 1;
          throw new TypeError("fetch failed");
        }
        // If no tab gets an answer in time, the server counts a late refresh. It accepts only a few of them per day.
        if (draw < 0.5 && answered === server.generation) {
          late += 1;
          await clock.sleep(random() * 2 * 3_600_000);
        } else {
          answered = server.generation;
        }
        return response;
      };
    };
    const tab = async (): Promise<void> => {
      const client = server.client({ store: storage.view() });
      client.session.onChange(() => {});
      while (clock.now() < end) {
        // A tab wakes up when the access token expires, as pages with a timer do, or at a random time.
        const lifetime = LIFETIME * 1000;
        await clock.sleep(random() < 0.7 ? lifetime - (clock.now() % lifetime) : random() * lifetime);
        server.fates = Array.from({ length: TABS * 4 }, fate);
        await client.session.accessToken().catch((thrown: Error) => assert.notEqual(thrown.name, "NoSessionError"));
      }
    };
    await clock.run(server.client({ store: storage.view() }).login(credentials));
    await clock.run(clock.sleep(10_000));
    await clock.run(Promise.all(Array.from({ length: TABS }, tab)));
    server.fates = [];
    await clock.run(clock.sleep(3 * 3_600_000));
    await clock.run(server.client({ store: storage.view() }).user());
    assert.ok(server.isLive, `seed ${seed}`);
    regressions += storage.regressions;
  }
  t.diagnostic(`${refreshes} refreshes, ${lost} lost answers, ${late} late answers, ${regressions} overwritten tokens`);
  assert.ok(refreshes > SEEDS * 50 && lost > SEEDS * 10 && late > SEEDS * 10);
});
