// Markdown: growing text as headings, lists, code and emphasis. Markup is hidden, not removed: the elements hold the whole text.

import { addHtml } from './svg.js';

/**
 * @typedef {{ text: string, draw: (parent: Element, text: string, isRest: boolean) => Element }} Piece
 *   Text of one origin; `draw` adds a part of it, and is told whether that is a part behind the first one.
 * @typedef {{ end: number, style: string }} Run A part of a line up to `end`; its style is element names, or `markup`.
 * @typedef {{ name: string, className: string, runs: Run[] }} Line How a line is drawn: one element with runs of text.
 * @typedef {{ area: Element, fence: string, indent: number, source: string }} Code A code block: its lines are indented as its fence is.
 */

const LONGEST = 2000; // characters of a line with markup: a growing line is drawn again with each frame
const FENCE = /^([ \t]*)(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const TABLE = /^[ \t]*\|/;
// Code, bold and italic text, and escaped punctuation. Links stay as they are written, and names such as __init__ too.
const INLINE = /(`+)(?!`)(.+?)(?<!`)\1(?!`)|(\*\*)(?=\S)(.+?)(?<=\S)\3|((?<![\w*])\*)(?=[^\s*])(.+?)(?<=[^\s*])\*(?!\*)|\\([!-/:-@[-`{-~])/g;

/** Text that grows at its end. Only the last line is drawn again, so the work is proportional to the text. */
export class MarkdownText {
  /** @param {Element} parent */
  constructor(parent) {
    this._parent = parent;
    /** @type {Code | null} */
    this._code = null; // the block of the current line
    /** @type {Piece[]} */
    this._pieces = []; // of the current line
    this._drawn = 0; // pieces of it that are drawn without markup
    this._line = ''; // its text
    /** @type {Element | null} */
    this._element = null;
  }

  /** Add text; it is shown by `draw`. @param {Piece} piece */
  add(piece) {
    let isRest = false;
    for (const part of piece.text.split(/(?<=\n)/)) {
      const started = isRest;
      this._pieces.push({ text: part, draw: (parent, text, rest) => piece.draw(parent, text, started || rest) });
      this._line += part;
      isRest = true;
      if (part.endsWith('\n')) this._end();
    }
  }

  /** Show the line that is not complete. */
  draw() {
    if (this._line.length > LONGEST) this._drawRest();
    else if (this._pieces.length) this._drawLine(this._line.replace(/\n$/, ''));
  }

  /** Draw what a line that is too long for markup has more than before. */
  _drawRest() {
    this._element ??= addHtml(this._code?.area ?? this._parent, this._code ? 'span' : 'div');
    for (const piece of this._pieces.slice(this._drawn)) piece.draw(this._element, piece.text, false);
    this._drawn = this._pieces.length;
  }

  /** @param {string} text of the current line, without its end */
  _drawLine(text) {
    const { name, className, runs } = this._code ? codeLine(text, this._code) : textLine(text);
    this._element?.remove();
    this._element = addHtml(this._code?.area ?? this._parent, name, className ? { class: className } : {});
    this._drawn = this._pieces.length;
    drawRuns(this._element, this._pieces, runs);
  }

  /** Draw the current line for the last time. */
  _end() {
    this.draw();
    const text = this._line.slice(0, -1);
    const element = this._element;
    if (this._code && closes(text, this._code)) this._code = null;
    else if (this._code) this._code.source += this._line.slice(indentOf(text, this._code));
    else if (element?.className === 'fence') this._code = openCode(this._parent, element, text);
    [this._pieces, this._drawn, this._line, this._element] = [[], 0, '', null];
  }
}

/** A code block with the line that opens it as its head, and a button that copies it. @param {Element} parent @param {Element} head @param {string} text */
function openCode(parent, head, text) {
  const [, indent, fence] = FENCE.exec(text) ?? ['', '', ''];
  const block = addHtml(parent, 'div', { class: 'code' });
  block.append(head);
  const button = addHtml(head, 'button', { type: 'button', class: 'copy', 'aria-label': 'Copy the code', 'data-label': 'Copy' });
  const area = addHtml(addHtml(block, 'pre'), 'code');
  const code = { area, fence, indent: indent.length, source: '' };
  button.addEventListener('click', async () => {
    button.setAttribute('data-label', (await copied(code.source, area)) ? 'Copied' : 'Selected');
    setTimeout(() => button.setAttribute('data-label', 'Copy'), 1500);
  });
  return code;
}

/** Whether text is in the clipboard; where pages may not write there, its element is selected. @param {string} text @param {Element} element */
async function copied(text, element) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection()?.selectAllChildren(element);
    return false;
  }
}

/** Whether a line closes a code block. @param {string} text @param {Code} code */
function closes(text, { fence }) {
  const found = FENCE.exec(text);
  return found !== null && found[2].startsWith(fence) && found[3].trim() === '';
}

/** How many characters of a line are the indentation of its block. @param {string} text @param {Code} code */
function indentOf(text, { indent }) {
  return Math.min(indent, text.length - text.trimStart().length);
}

/** @param {string} text @param {Code} code @returns {Line} */
function codeLine(text, code) {
  const end = closes(text, code) ? text.length + 1 : indentOf(text, code); // with the end of the line
  return { name: 'span', className: '', runs: [{ end, style: 'markup' }] };
}

/** @param {string} text @returns {Line} */
function textLine(text) {
  const fence = FENCE.exec(text);
  if (fence) return { name: 'div', className: 'fence', runs: [{ end: text.length - fence[3].length, style: 'markup' }] };
  if (RULE.test(text)) return { name: 'div', className: 'rule', runs: [{ end: text.length, style: 'markup' }] };
  if (TABLE.test(text)) return { name: 'div', className: 'cells', runs: [] };
  const heading = HEADING.exec(text);
  if (heading) return { name: `h${Math.min(6, heading[1].length + 2)}`, className: '', runs: marked(text, heading[0].length) };
  const quote = QUOTE.exec(text);
  if (quote) return { name: 'div', className: 'quote', runs: marked(text, quote[0].length) };
  const item = ITEM.exec(text);
  if (!item) return { name: 'div', className: text.trim() ? '' : 'gap', runs: marked(text, 0) };
  const depth = Math.min(4, Math.floor(item[1].replaceAll('\t', '  ').length / 2));
  const isNumbered = /\d/.test(item[2]);
  const runs = marked(text, isNumbered ? 0 : item[0].length);
  if (isNumbered) runs.unshift({ end: item[1].length, style: 'markup' });
  return { name: 'div', className: `item d${depth}${isNumbered ? '' : ' bullet'}`, runs };
}

/** The runs of a line whose first characters are markup. @param {string} text @param {number} start @returns {Run[]} */
function marked(text, start) {
  return [{ end: start, style: 'markup' }, ...inline(text.slice(start), start, '')];
}

/** @param {string} text @param {number} start of the text in its line @param {string} style around it @returns {Run[]} */
function inline(text, start, style) {
  /** @type {Run[]} */
  const runs = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, ticks, , bold, , italic] = found;
    const from = start + found.index;
    const markup = (ticks ?? bold ?? italic ?? '\\').length;
    const [begin, end] = [from + markup, from + whole.length - (ticks || bold || italic ? markup : 0)];
    runs.push({ end: from, style }, { end: begin, style: 'markup' });
    const name = ticks ? 'code' : bold ? 'strong' : italic ? 'em' : '';
    const within = `${style} ${name}`.trim();
    if (bold || italic) runs.push(...inline(text.slice(begin - start, end - start), begin, within));
    runs.push({ end, style: within }, { end: from + whole.length, style: 'markup' });
    at = found.index + whole.length;
  }
  return [...runs, { end: start + Math.max(at, text.length), style }];
}

/** Draw the pieces of a line, each cut where runs end; text behind the last run has no style. @param {Element} line @param {Piece[]} pieces @param {Run[]} runs */
function drawRuns(line, pieces, runs) {
  let [run, at, drawn] = [0, 0, -1];
  let parent = line;
  for (const piece of pieces) {
    const first = at;
    const last = at + piece.text.length;
    while (at < last) {
      while (run < runs.length && runs[run].end <= at) run += 1;
      const end = Math.min(last, runs[run]?.end ?? last);
      if (run !== drawn) parent = styled(line, runs[run]?.style ?? '');
      drawn = run;
      piece.draw(parent, piece.text.slice(at - first, end - first), at > first);
      at = end;
    }
  }
}

/** The element for text of a style at the end of a line. @param {Element} line @param {string} style */
function styled(line, style) {
  if (style === 'markup') return addHtml(line, 'span', { class: 'markup' });
  return style.split(' ').reduce((parent, name) => (name ? addHtml(parent, name) : parent), line);
}
