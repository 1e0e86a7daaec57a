// The Generation view: two continuations of one prompt side by side, with and without retrieval, token by token.

import { stream, whenServed } from "./api.js";
import { element, language } from "./elements.js";
import { queryForm } from "./query_form.js";
import { announce, noModel, problem } from "./region.js";

const FINISHED = { stop: "end of the document", length: "token limit reached" };

const view = document.getElementById("generation");
const form = view.querySelector("form");
const results = view.querySelector(".results");
const stop = form.querySelector(".stop");
let control = new AbortController();

export const show = queryForm(form, "generation", generate);
stop.addEventListener("click", () => control.abort());
whenServed(({ model }) => !model && results.replaceChildren(noModel()));

async function generate(values) {
  control.abort();
  const own = (control = new AbortController());
  const request = requestOf(values);
  stop.disabled = false;
  announce("Generating with and without retrieval.");
  const panes = [true, false].map((retrieval) => pane({ ...request, retrieval }, () => generate(values)));
  results.replaceChildren(element("div", { class: "panes" }, ...panes.map(({ card }) => card)));
  await Promise.all(panes.map(({ run }) => run(own)));
  if (own !== control) return;
  stop.disabled = true;
  announce(own.signal.aborted ? "Stopped." : "Both texts are complete.");
}

/** Convert the form's values to a request of the API; values that the address lacks are read from the form. */
function requestOf(values) {
  const request = { prompt: values.get("text"), stream: true };
  for (const name of ["k", "max_tokens", "temperature", "top_k", "top_p", "seed"]) {
    request[name] = Number(values.get(name) || form.elements[name].value);
  }
  return request;
}

/** One of the two texts: its card, and the function that generates it. */
function pane(request, retry) {
  const { prompt, retrieval } = request;
  const title = retrieval ? "With retrieval" : "Without retrieval";
  const state = element("p", { class: "state" });
  const text = element("span", { class: "generated" });
  const output = element("pre", { class: "text", ...language(prompt) }, element("span", { class: "prompt" }, prompt), text);
  const trouble = element("div");
  const card = element("section", { class: "card pane", "aria-label": title }, element("h3", {}, title), state, output, trouble);

  const run = async (own) => {
    const started = performance.now();
    const say = (what) => (state.textContent = `${what} · ${((performance.now() - started) / 1000).toFixed(1)} s`);
    const fail = (error) => {
      state.textContent = "";
      trouble.replaceChildren(problem(error, retry));
    };
    card.classList.add("running");
    state.textContent = "Generating…";
    try {
      say(FINISHED[await follow(request, text, own.signal)]);
    } catch (error) {
      if (own.signal.aborted) say("stopped");
      else fail(error);
    }
    card.classList.remove("running");
  };
  return { card, run };
}

async function follow(request, text, signal) {
  for await (const event of stream("generate", request, signal)) {
    text.append(event.text);
    if (event.finish_reason) return event.finish_reason;
  }
}
