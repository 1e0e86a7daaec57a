// The Passage view: tokens colored by how much retrieval helped (blue) or hurt (orange), with the exact numbers.

import { post, whenServed } from "./api.js";
import { element, figures, language } from "./elements.js";
import { roving } from "./keyboard.js";
import { fixed, percent, signed } from "./numbers.js";
import { queryForm } from "./query_form.js";
import { fill, noModel, notice } from "./region.js";

/** Choices for the difference in nats that has the full color. */
const SCALES = [0.05, 0.1, 0.2, 0.5, 1, 2, 5];

const view = document.getElementById("passage");
const form = view.querySelector("form");
const results = view.querySelector(".results");

export const show = queryForm(form, "passage", score);
whenServed(({ model }) => !model && results.replaceChildren(noModel()));

function score(values) {
  fill(results, "Scoring the passage with and without retrieval…", async (signal) => {
    const body = { text: values.get("text"), k: Number(values.get("k") ?? form.elements.k.value) };
    const answer = await post("score", body, signal);
    const compared = answer.bits_per_byte_on !== null;
    const missing = notice("Retrieval OFF only", "This model does not retrieve, so there is no comparison.");
    return { nodes: [bits(answer), compared ? colored(answer.tokens) : missing], summary: summary(answer) };
  });
}

function summary({ bits_per_byte_on: on, bits_per_byte_off: off }) {
  if (on === null) return `${fixed(off, 4)} bits per byte without retrieval.`;
  return `${fixed(on, 4)} bits per byte with retrieval, ${fixed(off, 4)} without: ${signed((100 * (on - off)) / off, 2)} percent.`;
}

/** Key figures. Lower bits per byte are better, so a negative difference is blue. */
function bits({ tokens, bits_per_byte_on: on, bits_per_byte_off: off }) {
  if (on === null) return figures([["Bits per byte, retrieval OFF", fixed(off, 4)]]);
  const change = (100 * (on - off)) / off;
  const helped = tokens.filter(({ difference }) => difference > 0).length;
  return figures([
    ["Bits per byte, retrieval ON", fixed(on, 4)],
    ["Bits per byte, retrieval OFF", fixed(off, 4)],
    ["Difference", `${signed(change, 2)} %`, change < 0 ? "helped" : change > 0 ? "hurt" : ""],
    ["Tokens that retrieval helped", percent(helped / tokens.length)],
  ]);
}

function colored(tokens) {
  const text = element("div", { class: "text tokens", role: "group", "aria-label": "Tokens", ...language(tokens.map((each) => each.text).join("")) });
  text.append(...tokens.map(tokenNode));
  text.firstElementChild?.setAttribute("tabindex", "0");
  roving(text, ".token");

  const readout = element("output", { class: "readout" }, "Point at a token, tap it, or use the arrow keys to see its numbers.");
  const read = ({ target }) => {
    const number = [...text.children].indexOf(target.closest(".token"));
    if (number < 0) return;
    text.querySelector(".active")?.classList.remove("active");
    text.children[number].classList.add("active");
    readout.replaceChildren(...numbersOf(tokens[number], number, tokens.length));
  };
  for (const event of ["pointerover", "focusin", "click"]) text.addEventListener(event, read);

  const legend = element("div", { class: "legend" });
  const select = element("select", { id: "passage-scale" }, ...SCALES.map((nats) => element("option", { value: nats }, `${nats} nats`)));
  select.value = fittingScale(tokens);
  const paint = () => {
    const limit = Number(select.value);
    tokens.forEach(({ difference }, number) => text.children[number].style.setProperty("--strength", Math.min(1, Math.abs(difference) / limit)));
    legend.replaceChildren(...legendOf(limit));
  };
  select.addEventListener("change", paint);
  paint();
  const scale = element("label", { class: "field" }, "Full color at", select);
  return element("section", { class: "card passage" }, element("div", { class: "scale" }, legend, scale), readout, text);
}

function tokenNode({ text, difference }) {
  const sign = difference > 0 ? "helped" : difference < 0 ? "hurt" : "";
  // A token without characters is a part of a character.
  const kind = text.includes("\n") ? "newline" : text === "" ? "empty" : "";
  return element("span", { class: `token ${sign} ${kind}`.trim(), tabindex: -1 }, text);
}

function numbersOf({ text, on, off, difference }, number, total) {
  const verdict = difference > 0 ? "helped" : difference < 0 ? "hurt" : "";
  const item = (label, value, kind = "") => element("span", {}, `${label} `, element("b", { class: kind }, value));
  return [
    element("code", {}, JSON.stringify(text)),
    item("ON", `${fixed(on, 3)} nats`),
    item("OFF", `${fixed(off, 3)} nats`),
    item("difference", `${signed(difference, 3)} nats`, verdict),
    item("probability", `${percent(Math.exp(off), 1)} → ${percent(Math.exp(on), 1)}`),
    element("span", {}, `token ${number + 1} of ${total}`),
  ];
}

/** The smallest scale at which at most one token in twenty has the full color. */
function fittingScale(tokens) {
  const sizes = tokens.map(({ difference }) => Math.abs(difference)).filter(Boolean).sort((a, b) => a - b);
  const high = sizes[Math.floor(0.95 * sizes.length)] ?? 1;
  return SCALES.find((scale) => scale >= high) ?? SCALES.at(-1);
}

function legendOf(limit) {
  const label = (text) => element("span", {}, text);
  return [
    element("div", { class: "gradient", "aria-hidden": "true" }),
    element("div", { class: "ticks" }, label(`−${limit} nats: hurt`), label("0"), label(`+${limit} nats: helped`)),
  ];
}
