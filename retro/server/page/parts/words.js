// The words of a question, where they occur in a text.

const COMMON = new Set(
  "about and are but can could did does for from had has have her his how into its not one our should some than that the their them then there these they this was were what when where which who why will with would you your".split(" "),
);
const LEAST_LETTERS = 3; // of a word in an alphabet
const LONGEST_ENDING = 3; // open, opens, opened, opening
const NO_SPACES = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}]/u;

/**
 * The places of a question's words in a text, also with another ending. Words that occur everywhere are left out.
 *
 * @param {string} question
 * @param {string} text
 * @returns {{start: number, stop: number}[]} in UTF-16 units
 */
export function wordsIn(question, text) {
  const segments = [...new Intl.Segmenter(undefined, { granularity: "word" }).segment(question)];
  const words = [...new Set(segments.flatMap(({ segment }) => segment.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? []))];
  const [joined, spaced] = [words.filter((word) => NO_SPACES.test(word)), words.filter((word) => !NO_SPACES.test(word) && word.length >= LEAST_LETTERS && !COMMON.has(word))];
  const patterns = [...joined, ...spaced.map((word) => `(?<![\\p{L}\\p{N}])${word}\\p{L}{0,${LONGEST_ENDING}}(?![\\p{L}\\p{N}])`)];
  if (!patterns.length) return [];
  return Array.from(text.matchAll(new RegExp(patterns.join("|"), "giu")), ({ 0: word, index }) => ({ start: index, stop: index + word.length }));
}
