/** Holds the session as text. Several clients, for example the tabs of a browser, can share it. */
export interface SessionStore {
  get(): string | null | Promise<string | null>;
  set(value: string): void | Promise<void>;
  /** Calls `changed` after each change that another client made. Returns a function that removes `changed`. */
  subscribe?(changed: () => void): () => void;
}

/** Creates a store that lasts as long as the page or process. */
export function memoryStore(): SessionStore {
  let value: string | null = null;
  return {
    get: () => value,
    set: (next) => void (value = next),
  };
}

/**
 * Creates a store that the tabs of an origin share. It holds the session in memory if the browser refuses access to
 * localStorage, or if localStorage is full.
 */
export function localStorageStore(key: string): SessionStore {
  let unsaved: string | null = null;
  return {
    get() {
      try {
        return unsaved ?? localStorage.getItem(key);
      } catch {
        return unsaved;
      }
    },
    set(value) {
      try {
        localStorage.setItem(key, value);
        unsaved = null;
      } catch {
        unsaved = value;
      }
    },
    subscribe(changed) {
      const listener = (event: StorageEvent) => {
        // The key is null after `localStorage.clear()`.
        if (event.key === key || event.key === null) changed();
      };
      addEventListener("storage", listener);
      return () => removeEventListener("storage", listener);
    },
  };
}
