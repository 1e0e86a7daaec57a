// A form with its values in the address: submitting writes the address; an address with a text fills and submits the form.
// Once a question is asked, the form shrinks to a line with the text and a button to change it. A form with `data-opens` begins
// with the best example; one with `data-asks` stays open then, for a question of the user.

import { writeAddress } from "../lib/address.js";
import { element, language } from "../lib/elements.js";
import { counted } from "../lib/numbers.js";
import { markExample, offerExamples } from "./examples.js";
import { skeleton } from "./region.js";

/**
 * @param {HTMLFormElement} form has a `textarea` named `text`, and the parts `.asked`, `.inputs` and `.examples`
 * @param {string} view name of the view in the address
 * @param {(values: URLSearchParams) => void} run
 * @returns {(parameters: URLSearchParams) => void} shows the view with the parameters of an address
 */
export function queryForm(form, view, run) {
  let [shown, begun] = ["", false];

  const start = (values) => {
    shown = values.toString();
    shrink(form, values.get("text"));
    markExample(form);
    run(values);
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const values = valuesOf(form);
    writeAddress(view, values, values.toString() === shown ? "replaceState" : "pushState");
    start(values);
    showResults(form);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  const best = offerExamples(form);

  /** Begin with the best example, unless the user begins first. */
  const begin = async () => {
    begun = true;
    const [empty, waiting] = [form.parentElement.querySelector(".empty"), skeleton("Looking for an example…")];
    empty?.replaceWith(waiting);
    const text = await best;
    waiting.replaceWith(empty);
    if (shown || !text || form.elements.text.value || form.querySelector(".inputs").matches(":focus-within")) return;
    const values = valuesOf(form);
    values.set("text", text);
    if (!("asks" in form.dataset)) {
      form.elements.text.value = text;
      start(values);
      return;
    }
    shown = values.toString();
    markExample(form, text);
    run(values);
  };

  return (parameters) => {
    if (parameters.get("text")) {
      if (parameters.toString() !== shown) {
        restore(form, parameters);
        start(parameters);
      }
    } else if (shown) writeAddress(view, new URLSearchParams(shown), "replaceState");
    else if (parameters.size) restore(form, parameters);
    else if ("opens" in form.dataset && !begun) begin();
  };
}

const valuesOf = (form) => new URLSearchParams(new FormData(form));

function shrink(form, text) {
  const [asked, inputs] = [form.querySelector(".asked"), form.querySelector(".inputs")];
  const grow = () => {
    [asked.hidden, inputs.hidden] = [true, false];
    form.elements.text.focus();
  };
  asked.replaceChildren(
    element("p", language(text), text.trim().replace(/\s+/gu, " ")),
    element("span", { class: "label" }, counted(Array.from(text).length, "character")),
    element("button", { type: "button", click: grow }, "Change text"),
  );
  [asked.hidden, inputs.hidden] = [false, true];
  form.classList.add("answered"); // Leaves room below, so that the page can scroll before the answer is there.
}

/** Scroll to what the form shows now and to the results below it, and move the focus there: the button is hidden. */
function showResults(form) {
  form.scrollIntoView({ block: "start" });
  form.parentElement.querySelector(".results").focus({ preventScroll: true });
}

/** Write the n-th value of a name into the n-th field of that name. */
function restore(form, parameters) {
  form.dispatchEvent(new CustomEvent("restore", { detail: parameters }));
  for (const name of new Set(parameters.keys())) {
    const fields = form.querySelectorAll(`[name="${CSS.escape(name)}"]`);
    parameters.getAll(name).forEach((value, number) => {
      if (fields[number]) fields[number].value = value;
    });
  }
}
