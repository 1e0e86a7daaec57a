// One of the two answers to a question: its card, its passages, and the words that it has from them.

import { stream } from "../lib/api.js";
import { element, language } from "../lib/elements.js";
import { roving } from "../lib/keyboard.js";
import { counted, percent } from "../lib/numbers.js";
import { cut, marked, reachable } from "./marks.js";
import { neighborFold } from "./neighbor.js";
import { write } from "./writing.js";

const LOW_BECAUSE = { "short prompt": ", because the question is short", "other text": ", because copying would have gained little in the question" };

/**
 * @param {string} title
 * @param {string} key of the answer, unique on the page
 * @param {object} request body of POST /v1/chat/completions
 * @param {() => void} retry
 * @returns {{card: HTMLElement, sources: HTMLElement, run: (own: AbortController) => Promise<void>, text: () => string}}
 *   `sources`: the passages, while the answer is written without marks
 */
export function answerOf(title, key, request, retry) {
  const state = element("p", { class: "state" });
  const trouble = element("div");
  const written = document.createTextNode(""); // a single one, so that no piece moves when a word grows beyond its line
  const output = element("div", { class: "answer", "aria-live": "polite", "aria-busy": "true", ...language(request.messages.at(-1).content) }, written);
  const grounds = element("p", { class: "grounds" });
  const card = element("section", { class: "card pane", "aria-label": title }, element("h4", {}, title), state, trouble, output, grounds);
  const sources = element("div", { class: "found" });
  let [text, passages] = ["", []];

  const show = (event) => {
    text += event.text;
    written.appendData(event.text);
    if (event.retrieval?.passages) sources.replaceChildren(...listed((passages = event.retrieval.passages), [], key));
    if (event.retrieval?.quotes) {
      const { quotes } = event.retrieval;
      sources.replaceChildren(...listed(passages, quotes, key));
      output.replaceChildren(...marked(cut(text, quotes.map((quote, index) => answerMark(quote, key, index))), true));
      reachable(output);
      grounds.textContent = sentences(event.retrieval, passages.length);
    }
  };
  const run = async (own) => {
    await write({ card, state, trouble }, events(request, own.signal), own, show, retry);
    output.setAttribute("aria-busy", "false");
  };
  roving(output, "mark:not(.gap)");
  return { card, sources, run, text: () => text };
}

async function* events(request, signal) {
  for await (const { choices } of stream("v1/chat/completions", request, signal)) {
    for (const { delta, finish_reason, retrieval } of choices) yield { text: delta.content ?? "", finish_reason, retrieval, tokens: delta.role ? 0 : 1 };
  }
}

const answerMark = ({ text: [start, stop], passage, words }, key, index) => ({ start, stop, key: `${key}.${index}`, tokens: words, rank: passage - 1, about: `word for word in passage ${passage}` });

/** The passages with the words that the answer has from them; those that it has words from are open. */
function listed(passages, quotes, key) {
  if (!passages.length) return [element("p", { class: "label" }, "No passage fits the question, or none fits into the prompt.")];
  const numbered = quotes.map((quote, index) => ({ ...quote, key: `${key}.${index}` }));
  const cards = passages.map((passage) => passageFold(passage, numbered.filter((quote) => quote.passage === passage.number)));
  return [element("h3", {}, "Passages"), ...cards];
}

function passageFold(passage, quotes) {
  const marks = quotes.map(({ passage_text: [start, stop], key, words }) => ({ start, stop, key, tokens: words, rank: passage.number - 1, about: "word for word in the answer" }));
  const words = quotes.reduce((sum, quote) => sum + quote.words, 0);
  const fold = neighborFold({ ...passage, continuation: "" }, passage.number - 1, marks, words ? `${counted(words, "word")} in the answer` : "", words > 0);
  fold.classList.add("traced");
  if (words) fold.dataset.keys = quotes.map((quote) => quote.key).join(" ");
  return fold;
}

/** What the answer has from passages and datastore, in words. A model that copies nothing has no trust. */
function sentences({ quoted, copied, trust }, passages) {
  const own = passages ? `${percent(quoted)} of the words are in the passages word for word.` : "No passage fits the question: the model answered alone.";
  return trust ? `${own} The model copied ${percent(copied)} of the answer and trusted the datastore ${percent(trust.share)}${LOW_BECAUSE[trust.low_because] ?? ""}.` : own;
}
