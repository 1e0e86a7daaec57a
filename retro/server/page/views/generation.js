// "Write": two continuations of one prompt side by side, with and without neighbors, token by token, and what was read.

import { served, whenServed } from "../lib/api.js";
import { element } from "../lib/elements.js";
import { downloadButton } from "../parts/download.js";
import { markDifference, pane } from "../parts/pane.js";
import { queryForm } from "../parts/query_form.js";
import { readChunks } from "../parts/read_chunks.js";
import { announce, noModel } from "../parts/region.js";
import { strip } from "../parts/strip.js";
import { traceLink } from "../parts/trace_link.js";

const FIELDS = ["k", "max_tokens", "temperature", "top_k", "top_p", "seed"];

const view = document.getElementById("generation");
const form = view.querySelector("form");
const results = view.querySelector(".results");
let control = new AbortController();

export const show = queryForm(form, "generation", generate);
whenServed(({ model }) => {
  if (!model) results.replaceChildren(noModel());
});

/** With and without neighbors, or only without. */
const modesOfModel = () => served().then(({ model }) => (model?.retrieval === false ? [false] : [true, false]), () => [true, false]);

async function generate(values) {
  control.abort();
  const own = (control = new AbortController());
  const modes = await modesOfModel();
  if (own !== control) return;
  const request = requestOf(values);
  announce("Writing with and without neighbors.", view);
  const read = readChunks(request.prompt);
  const panes = modes.map((retrieval) =>
    pane({ ...request, retrieval, return_sources: retrieval }, () => generate(values), retrieval ? read.add : () => {}),
  );
  const stop = element("button", { type: "button", class: "stop", click: () => own.abort() }, "Stop");
  const save = downloadButton("texts", () => ({ request, ...Object.fromEntries(panes.map(({ name, answer }) => [name, answer()])) }));
  const about = element("span", {}, modes[0] ? "Same prompt (grey), same settings." : "This model does not read neighbors.");
  const cards = panes.map(({ card }) => card);
  const line = strip("generation-strip", [about, stop], [modes[0] ? legend() : "", element("p", {}, save)]);
  results.replaceChildren(line, element("div", { class: "panes" }, ...cards), read.card);
  await Promise.all(panes.map(({ run }) => run(own)));
  read.finish();
  if (own !== control) return;
  stop.remove();
  if ((await served()).trace) for (const { card, answer } of panes) card.append(traceLink(answer().text));
  if (modes[0]) about.replaceChildren(...difference(markDifference(cards)));
  announce(own.signal.aborted ? "Stopped." : "Both texts are complete.", view);
}

/** The first words that differ, in a sentence. */
function difference([on, off]) {
  if (on === undefined) return ["Both texts are the same as far as they go."];
  return ["First difference: ", element("b", { class: "helped" }, on), " with neighbors, ", element("b", { class: "hurt" }, off), " without."];
}

function legend() {
  const item = (kind, sample, text) => element("li", {}, element("span", { class: kind }, sample), text);
  return element(
    "ul",
    { class: "legend-list" },
    element("li", {}, "Same prompt (grey), same settings, same seed. One text reads neighbors, the other does not."),
    item("copied", "Underlined", ": copied from a neighbor. The neighbors are listed below the texts."),
    item("border", "", "A bar: the next chunk begins here, and the model reads other neighbors."),
  );
}

/** Convert the form's values to a request of the API; values that the address lacks are read from the form. */
function requestOf(values) {
  const request = { prompt: values.get("text"), stream: true };
  for (const name of FIELDS) request[name] = Number(values.get(name) || form.elements[name].value);
  return request;
}
