// Words: readable names of tokens, threads and numbers.

/** @typedef {import('./trace.js').Trace} Trace */
/** @typedef {import('./trace.js').ThreadRecord} ThreadRecord */

/** Why a draft is narrower than its limits allow. @type {Record<import('./trace.js').Reason, string>} */
export const REASONS = {
  budget: 'drafts may not cost the request more time',
  not_worth_it: 'further rows are not expected to be worth their time',
  no_candidates: 'no source proposes a token',
  grammar: 'the grammar allows no proposed token',
  end_of_text: 'the text reaches its token limit',
  row_limit: 'the engine or the other threads take the rows',
  shared_call: 'the requests of the call agreed on fewer rows',
};

/** Why a text ended before the model ended it. @type {Record<string, string>} */
const EARLY_ENDINGS = {
  length: 'cut off at the maximum of tokens (Settings) or the end of the context',
  total: 'cut off at the maximum of tokens of all threads',
  deadline: 'cut off at the time limit of the service',
  cancelled: 'cut off by the service',
};

const JOINERS = '\u200c\u200d'; // needed inside words and emoji

/** Text with invisible and invalid characters replaced by their codes. @param {string} text */
export function visible(text) {
  return Array.from(text, shown).join('');
}

/** Text in quotes on one line, so that its spaces are visible. @param {string} text */
export function quoted(text) {
  return `“${visible(text).replaceAll('\n', '⏎').replaceAll('\t', '⇥')}”`;
}

/** Why a text is not complete; nothing if the model ended it. @param {string} ending */
export function endingIn(ending) {
  return EARLY_ENDINGS[ending] ?? '';
}

/** A count with its noun in singular or plural. @param {number} count @param {string} thing */
export function counted(count, thing) {
  return count === 1 ? `${count} ${thing}` : `${count} ${thing}s`;
}

/** A number with three significant digits, or without decimals from 1000 on. @param {number} value */
export function number(value) {
  if (value >= 1000) return value.toFixed(0);
  return String(Number(value.toPrecision(3)));
}

/** A share as a percentage; a dash if there is no whole. @param {number} part @param {number} whole */
export function percent(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(1)}%` : '–';
}

/** A time with three significant digits. @param {number} value seconds */
export function seconds(value) {
  if (value >= 1) return `${number(value)} s`;
  return value >= 1e-3 ? `${number(value / 1e-3)} ms` : `${number(value / 1e-6)} µs`;
}

/** The text of a token, its role such as [Fork], or its id. @param {Trace} trace @param {number} token */
export function nameOf(trace, token) {
  const text = trace.texts[String(token)];
  if (text) return quoted(text);
  const { mask, fork, child, end } = trace.tokens;
  if (token === fork) return '[Fork]';
  if (token === child) return '[Child]';
  if (end.includes(token)) return '[End]';
  return mask.includes(token) ? '[M]' : `#${token}`;
}

/** The names of tokens, separated by spaces. @param {Trace} trace @param {readonly number[]} tokens */
export function namesOf(trace, tokens) {
  return tokens.map((token) => nameOf(trace, token)).join(' ');
}

/** The name of a thread: root, or its path. @param {ThreadRecord} thread */
export function nameOfThread(thread) {
  return thread.path.length ? `thread ${thread.path.join('.')}` : 'root';
}

/** The character, or its code if it is invisible, changes the direction of text or is invalid. @param {string} character */
function shown(character) {
  if ('\n\t'.includes(character) || JOINERS.includes(character)) return character;
  const code = /** @type {number} */ (character.codePointAt(0));
  const none = (code >= 0xfdd0 && code < 0xfdf0) || (code & 0xfffe) === 0xfffe;
  if (none || /[\p{Cc}\p{Cf}\p{Cs}]/u.test(character)) return `⟨${code.toString(16).toUpperCase().padStart(2, '0')}⟩`;
  return character;
}
