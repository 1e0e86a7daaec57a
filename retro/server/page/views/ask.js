// "Ask": a conversation with a chat model. Each question has two answers, one from passages of the datastore and one without,
// and one panel has the passages of the answer that the user points at.

import { served, whenServed } from "../lib/api.js";
import { element, language } from "../lib/elements.js";
import { answerOf } from "../parts/answer.js";
import { linkRuns } from "../parts/marks.js";
import { announce, noChat, noModel, problem } from "../parts/region.js";

const view = document.getElementById("ask");
const form = view.querySelector("form");
const turns = view.querySelector(".turns");
const panel = view.querySelector(".sources");
const empty = turns.querySelector(".empty");
const stop = form.querySelector(".stop");
const submit = form.querySelector("[type=submit]");
const question = form.elements.text;
let control = new AbortController();
let conversation = []; // of {question, answers}
let asked = 0;

/** Ask the question of an address, if it begins the conversation. @param {URLSearchParams} parameters */
export function show(parameters) {
  if (parameters.get("text") && !conversation.length) ask(parameters.get("text"));
}

whenServed(({ model }) => {
  if (model?.chat) return;
  turns.replaceChildren(model ? noChat() : noModel());
  form.hidden = true;
});

async function ask(text) {
  control.abort();
  const own = (control = new AbortController());
  busy(true);
  announce("Answering with and without the datastore.", view);
  try {
    const { model } = await served();
    if (model?.chat && !own.signal.aborted) await answer(text, model, own);
  } catch (error) {
    turns.replaceChildren(problem(error, () => ask(text))); // The server has answered nothing yet.
  }
  if (own === control) busy(false);
}

async function answer(text, model, own) {
  const key = `answer${asked++}`;
  const again = () => {
    conversation.splice(conversation.indexOf(turn), 1);
    node.remove();
    ask(text);
  };
  const answers = lanes(model).map(({ title, ...fields }, lane) => answerOf(title, `${key}.${lane}`, { ...fields, ...requestOf(text, lane) }, again));
  const turn = { question: text, answers };
  const node = element("article", { class: "turn" }, element("h3", { class: "question", ...language(text) }, text), element("div", { class: "panes", tabindex: 0, role: "group", "aria-label": "Answers" }, ...answers.map(({ card }) => card)));
  const follow = () => panel.firstElementChild !== answers[0].sources && panel.replaceChildren(answers[0].sources);
  for (const event of ["pointerover", "focusin"]) node.addEventListener(event, follow);
  empty.remove();
  if (!conversation.length) turns.replaceChildren();
  turns.append(node);
  conversation.push(turn);
  panel.hidden = false;
  follow();
  node.scrollIntoView({ block: "start" });
  await Promise.all(answers.map(({ run }) => run(own)));
  if (own === control) announce(own.signal.aborted ? "Stopped." : "Both answers are complete.", view);
}

/** With and without the datastore: title and model of each answer. */
function lanes({ name, retrieval }) {
  const passages = { passages: Number(form.elements.passages.value) };
  return [
    { title: "With the datastore", model: name, retrieval: passages },
    { title: "Without", model: retrieval ? `${name}:off` : name },
  ];
}

/** The conversation of a lane, with its own answers. A question without an answer is left out. */
function requestOf(text, lane) {
  const before = conversation.map((turn) => [turn.question, turn.answers[lane].text()]).filter(([, said]) => said.trim());
  const messages = before.flatMap(([user, assistant]) => [{ role: "user", content: user }, { role: "assistant", content: assistant }]);
  messages.push({ role: "user", content: text });
  return { messages, stream: true, temperature: 0, max_completion_tokens: Number(form.elements.max_completion_tokens.value) };
}

function busy(value) {
  view.classList.toggle("answering", value);
  [stop.hidden, submit.hidden] = [!value, value];
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (!text || view.classList.contains("answering")) return;
  question.value = "";
  question.focus();
  ask(text);
});
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});
stop.addEventListener("click", () => {
  control.abort();
  question.focus();
});
form.querySelector(".new").addEventListener("click", () => {
  control.abort();
  control = new AbortController();
  busy(false);
  conversation = [];
  turns.replaceChildren(empty);
  panel.replaceChildren();
  panel.hidden = true;
  announce("A new conversation.", view);
  question.focus();
});

/** Scroll the panel to the words that the user points at; a click or Enter opens their passage. */
function find(event) {
  const mark = event.target.closest?.(".answer mark");
  const card = mark && panel.querySelector(`.traced[data-keys~="${mark.dataset.keys.split(" ")[0]}"]`);
  if (!card || (event.type === "keydown" && event.key !== "Enter")) return;
  if (event.type === "pointerover" || event.type === "focusin") {
    const [words, box] = [(card.querySelector("mark.linked") ?? card).getBoundingClientRect(), panel.getBoundingClientRect()];
    if (words.top < box.top || words.bottom > box.bottom) panel.scrollTop += words.top - box.top - box.height / 3;
    return;
  }
  card.open = true;
  card.scrollIntoView({ block: "nearest" });
  card.querySelector("summary").focus({ preventScroll: true });
}

linkRuns(view.querySelector(".talk"));
for (const event of ["pointerover", "focusin", "click", "keydown"]) turns.parentElement.addEventListener(event, find);
