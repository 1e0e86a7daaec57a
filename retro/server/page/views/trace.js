// "Trace": the runs of a text that occur word for word in the stored documents, how often, and in which documents.

import { addressOf } from "../lib/address.js";
import { post, served, whenServed } from "../lib/api.js";
import { breakable, element, language } from "../lib/elements.js";
import { roving } from "../lib/keyboard.js";
import { counted, percent } from "../lib/numbers.js";
import { downloadButton } from "../parts/download.js";
import { cut, linkRuns, marked, reachable } from "../parts/marks.js";
import { queryForm } from "../parts/query_form.js";
import { fill, noSuffixes, notice } from "../parts/region.js";
import { strip } from "../parts/strip.js";

const LONGEST_QUOTE = 160; // characters
const MOST_RUNS = 40; // the longest ones are shown, the others unfold

const view = document.getElementById("trace");
const form = view.querySelector("form");
const results = view.querySelector(".results");

export const show = queryForm(form, "trace", find);
whenServed(({ trace }) => !trace && results.replaceChildren(noSuffixes()));

function find(values) {
  fill(results, "Searching the documents for parts of the text…", async (signal) => {
    const body = { text: values.get("text") };
    for (const name of ["least", "documents"]) body[name] = Number(values.get(name) ?? form.elements[name].value);
    const [answer, { datastores }] = [await post("trace", body, signal), await served()];
    const share = answer.tokens_in_runs / Math.max(1, answer.tokens);
    const sentence = `${percent(share)} of the tokens are in ${counted(answer.runs.length, "run")}`;
    const about = element("span", {}, `${counted(answer.tokens, "token")}, runs of at least ${body.least}`);
    const save = downloadButton("trace", () => ({ request: body, ...answer }));
    const searched = datastores.length > 1 ? [element("span", {}, searchedIn(datastores, answer.datastores))] : [];
    const line = strip("trace-strip", [element("b", { class: "verdict" }, sentence), about, ...searched], [legend(), element("p", {}, save)]);
    const card = answer.runs.length ? traced(answer, datastores.length > 1) : untraced(answer.text, body.least);
    return { nodes: [line, card], summary: `${sentence}.` };
  });
}

/** Which of several datastores were searched. */
function searchedIn(datastores, searched) {
  const others = datastores.map(({ name }) => name).filter((name) => !searched.includes(name));
  const missing = others.length ? `; not in ${others.join(", ")}, without the stage suffixes` : "";
  return `searched in ${searched.join(", ")}${missing}`;
}

function legend() {
  const sample = element("mark", { "data-ranks": "2" }, "Marked");
  sample.style.setProperty("--run", 0.8);
  return element(
    "ul",
    { class: "legend-list" },
    element("li", {}, sample, " text occurs in the documents. The run with this number is listed with them. The longer, the stronger the color."),
    element("li", {}, "A run is as long as possible to both sides. Runs of the same tokens, and those that overlap by half, are one."),
    element("li", {}, "A word at the edge of a run can be left out: with a space before it, or cut, it has other tokens."),
    element("li", {}, "Documents that were held out for evaluation, and deleted ones, are not searched."),
  );
}

/** A text without runs, in one column. */
function untraced(text, least) {
  const shorter = least > 1 ? " Try a smaller number of tokens." : "";
  const card = notice("No runs", `No run of ${counted(least, "token")} or more occurs in the documents.${shorter}`);
  card.append(element("pre", { class: "text", ...language(text) }, text));
  return card;
}

/** The text with its marks on the left and the runs on the right; on a phone, one above the other. */
function traced({ text, runs }, named) {
  const marks = runs.flatMap(({ text: whole, others, tokens, occurrences }, rank) => {
    const about = `run ${rank + 1}: ${counted(tokens, "token")}, ${times(occurrences)}`;
    return [whole, ...others].map(([start, stop]) => ({ start, stop, key: `run.${rank}`, tokens, rank, about }));
  });
  const shown = element("pre", { class: "text", ...language(text) }, ...marked(cut(text, marks), true));
  const cards = runs.map((run, rank) => ({ run, card: runCard(run, rank, text, named) }));
  const card = element(
    "article",
    { class: "card chunk trace" },
    element("div", { class: "query", tabindex: 0, role: "group", "aria-label": "Your text" }, shown),
    element("div", { class: "found" }, ...folded(cards)),
  );
  reachable(shown);
  roving(shown, "mark:not(.gap)");
  linkRuns(card);
  const open = (event) => {
    const mark = event.target.closest("mark");
    if (!mark || (event.type !== "click" && event.key !== "Enter")) return;
    const run = card.querySelector(`.traced[data-keys="${mark.dataset.keys.split(" ").at(-1)}"]`);
    run.closest("details")?.setAttribute("open", "");
    run.scrollIntoView({ block: "nearest" });
    run.querySelector("a").focus({ preventScroll: true });
  };
  for (const event of ["click", "keydown"]) card.addEventListener(event, open);
  return card;
}

/** The cards of the longest runs in the order of the text; the others unfold below. */
function folded(cards) {
  const ordered = [...cards].sort((a, b) => b.run.tokens - a.run.tokens);
  const long = new Set(ordered.slice(0, MOST_RUNS));
  const short = cards.filter((each) => !long.has(each));
  const nodes = cards.filter((each) => long.has(each)).map(({ card }) => card);
  if (!short.length) return nodes;
  return [...nodes, element("details", { class: "fold" }, element("summary", {}, counted(short.length, "shorter run")), ...short.map(({ card }) => card))];
}

/** `named`: with the name of the datastore. */
function runCard({ text: [start, stop], tokens, occurrences, datastore, places, count }, rank, text, named) {
  const characters = Array.from(text).slice(start, stop);
  const quote = characters.length > LONGEST_QUOTE ? `${characters.slice(0, LONGEST_QUOTE).join("")}…` : characters.join("");
  const such = count > 1 ? [element("span", { class: "such" }, `${counted(count, "such run")} in the text`)] : [];
  const more = `${named ? `in ${datastore}, ` : ""}${occurrences > places.length ? "for example in" : "in"}`;
  return element(
    "article",
    { class: "neighbor traced", "aria-label": `Run ${rank + 1}`, "data-keys": `run.${rank}` },
    element("p", { class: "facts" }, element("span", { class: "rank" }, rank + 1), element("b", {}, counted(tokens, "token")), element("span", {}, `${times(occurrences)}, ${more}`), ...such),
    element("ul", { class: "places" }, ...places.map((place) => element("li", {}, placeLink(place)))),
    element("pre", { class: "text", ...language(quote) }, quote.trim()),
  );
}

const times = (occurrences) => (occurrences === 1 ? "occurs once" : `occurs ${counted(occurrences, "time")}`);

function placeLink({ document_id: id, title, start: [chunk, start], stop: [last, stop] }) {
  const name = title || id;
  const link = element("a", { href: addressOf("document", { id, parameters: { chunk, start, last, stop } }), ...language(name) }, ...breakable(name));
  return title && id && title !== id ? element("span", {}, link, element("small", {}, ...breakable(id))) : link;
}
