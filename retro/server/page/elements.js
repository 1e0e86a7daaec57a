// DOM nodes from data. Text only ever enters as text: nothing here, nor anywhere in the page, parses data as HTML.

/**
 * An element with properties and children. `class`, `data-…`, `aria-…` and other attributes by their names in HTML,
 * functions as listeners (`click`), everything that is not a node as text.
 *
 * @param {string} name
 * @param {Record<string, unknown>} [attributes] null, undefined and false are left out
 * @param {...(Node | string | number | null)} children
 * @returns {HTMLElement}
 */
export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(key, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null).map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

/**
 * Attributes of an element that holds text of unknown language and direction.
 *
 * @param {string} text
 * @returns {{lang: string, dir: string}}
 */
export function language(text) {
  const scripts = [[/[\p{Script=Hiragana}\p{Script=Katakana}]/u, "ja"], [/\p{Script=Hangul}/u, "ko"], [/\p{Script=Han}/u, "zh"]];
  return { lang: scripts.find(([pattern]) => pattern.test(text))?.[1] ?? "", dir: "auto" };
}

/**
 * Where a text comes from: a link if it is an address of the web, the text as it is otherwise.
 *
 * @param {string} source
 * @returns {HTMLElement}
 */
export function sourceText(source) {
  if (!/^https?:\/\//i.test(source)) return element("span", {}, source);
  return element("a", { href: source, target: "_blank", rel: "noopener noreferrer" }, source);
}

/**
 * A table with a caption for readers of screens; numbers stand right.
 *
 * @param {string} caption
 * @param {[string, string][]} rows name and value
 * @returns {HTMLElement}
 */
export function factTable(caption, rows) {
  const body = rows.map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, value)));
  return element("table", {}, element("caption", { class: "visually-hidden" }, caption), element("tbody", {}, ...body));
}

/**
 * A few figures side by side.
 *
 * @param {[string, string, string?][]} items label, value, and what kind of value it is (a class)
 * @returns {HTMLElement}
 */
export function figures(items) {
  const cards = items.map(([label, value, kind]) =>
    element("div", { class: "card figure" }, element("dt", {}, label), element("dd", { class: kind }, value)),
  );
  return element("dl", { class: "figures" }, ...cards);
}
