/**
 * A SharedWorker that runs the tabs in rounds. At the start of a round every access token expires. In a round, no tab
 * sends its first refresh before every tab has read the store, so all send the same refresh token. An answer that is
 * held back arrives two rounds later.
 */

export type FromTab =
  | { kind: "join"; tabs: number }
  | { kind: "ready"; generation: number }
  | { kind: "sending" }
  | { kind: "held" }
  | { kind: "done" };

export type ToTab =
  | { kind: "go"; round: number }
  | { kind: "send" }
  | { kind: "release"; generation: number }
  | { kind: "finish" };

interface Tab {
  port: MessagePort;
  state: "ready" | "busy" | "sending" | "held" | "done";
  heldSince: number;
}

const ROUNDS_HELD = 2;
const tabs: Tab[] = [];
let expected = 0;
let round = 0;
let newest = 0;

(self as unknown as { onconnect: (event: MessageEvent) => void }).onconnect = ({ ports: [port] }) => {
  const tab: Tab = { port: port!, state: "busy", heldSince: 0 };
  tabs.push(tab);
  port!.onmessage = ({ data }: MessageEvent<FromTab>) => {
    switch (data.kind) {
      case "join":
        expected = data.tabs;
        tab.state = "ready";
        break;
      case "ready":
        newest = Math.max(newest, data.generation);
        tab.state = "ready";
        break;
      case "held":
        tab.heldSince = round;
        tab.state = "held";
        break;
      case "sending":
      case "done":
        tab.state = data.kind;
    }
    continueRound();
  };
};

function continueRound(): void {
  if (tabs.length < expected || inState("busy").length > 0) return;
  const sending = inState("sending");
  if (sending.length > 0) return resume(sending, { kind: "send" });
  const ready = inState("ready");
  const held = inState("held");
  const due = ready.length > 0 ? held.filter((tab) => round >= tab.heldSince + ROUNDS_HELD) : held;
  if (due.length > 0) return resume(due, { kind: "release", generation: newest });
  if (ready.length > 0) {
    round += 1;
    return resume(ready, { kind: "go", round });
  }
  for (const { port } of tabs) port.postMessage({ kind: "finish" } satisfies ToTab);
}

function inState(state: Tab["state"]): Tab[] {
  return tabs.filter((tab) => tab.state === state);
}

function resume(resumed: Tab[], message: ToTab): void {
  for (const tab of resumed) tab.state = "busy";
  for (const { port } of resumed) port.postMessage(message);
}
