// A button that saves an answer of the server as a file.

import { element } from "../lib/elements.js";

/** @param {string} name of the file, without suffix @param {() => unknown} data called when the button is pressed @returns {HTMLElement} */
export function downloadButton(name, data) {
  const save = () => {
    const address = URL.createObjectURL(new Blob([JSON.stringify(data(), null, 2)], { type: "application/json" }));
    element("a", { href: address, download: `${name}.json` }).click();
    URL.revokeObjectURL(address);
  };
  return element("button", { type: "button", class: "quiet", click: save }, "Download JSON");
}
