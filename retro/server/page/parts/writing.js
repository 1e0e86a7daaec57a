// A card whose text is streamed: its state in words, the time, and an error that ends it.

import { problem } from "./region.js";

const FINISHED = { stop: "complete", length: "limit reached" };

/**
 * Show the events of a stream until the text is complete or the user stops it. The card has the class `running` meanwhile.
 *
 * @param {{card: HTMLElement, state: HTMLElement, trouble: HTMLElement}} parts
 * @param {AsyncIterable<{finish_reason: string | null, tokens?: number}>} events `tokens`: 1 by default
 * @param {AbortController} own its signal ends the stream
 * @param {(event: object) => void} show called with each event
 * @param {() => void} retry
 */
export async function write({ card, state, trouble }, events, own, show, retry) {
  let [started, tokens] = [0, 0];
  const say = (what) => (state.textContent = `${what} · ${tokens} tokens in ${((performance.now() - started) / 1000).toFixed(1)} s`);
  card.classList.add("running");
  state.textContent = "Waiting for the server…";
  try {
    for await (const event of events) {
      started ||= performance.now(); // The time before is waiting: for the other text, or for other users.
      tokens += event.tokens ?? 1;
      show(event);
      say(event.finish_reason ? FINISHED[event.finish_reason] : "Writing");
      if (event.finish_reason) break;
    }
  } catch (error) {
    if (own.signal.aborted) tokens ? say("stopped") : (state.textContent = "stopped before the first token");
    else {
      state.textContent = tokens ? `broke off after ${tokens} tokens` : "failed";
      trouble.replaceChildren(problem(error, retry));
      trouble.scrollIntoView({ block: "nearest" });
    }
  }
  card.classList.remove("running");
}
