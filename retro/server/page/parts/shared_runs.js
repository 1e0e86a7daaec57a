// Runs of tokens that also occur in another text.

/** Shorter runs are noise: an `import` and a line break occur everywhere. */
export const LEAST_RUN = 5;

/**
 * The longest runs of at least `LEAST_RUN` tokens whose text occurs in `other`, in order. They do not overlap.
 *
 * @param {string[]} tokens texts of consecutive tokens
 * @param {string} other
 * @returns {{start: number, stop: number, at: number, text: string}[]} tokens [start, stop), and the place in `other`
 */
export function sharedRuns(tokens, other) {
  const found = [];
  let stop = 0;
  for (let start = 0; start < tokens.length; start++) {
    const before = stop;
    stop = Math.max(stop, start);
    // What begins one token later is a part of this run, so `stop` never has to go back.
    while (stop < tokens.length && other.includes(textOf(tokens, start, stop + 1))) stop++;
    if (stop > before && stop - start >= LEAST_RUN) found.push({ start, stop });
  }
  const taken = [];
  for (const run of found.sort((a, b) => b.stop - b.start - (a.stop - a.start))) {
    const free = taken.every(({ start, stop: end }) => run.stop <= start || run.start >= end);
    if (free && textOf(tokens, run.start, run.stop).trim()) taken.push(run);
  }
  return taken.sort((a, b) => a.start - b.start).map(({ start, stop: end }) => {
    const text = textOf(tokens, start, end);
    return { start, stop: end, at: other.indexOf(text), text };
  });
}

const textOf = (tokens, start, stop) => tokens.slice(start, stop).join("");
