// Answers: the text of an answer while it grows, as Markdown, each token coloured by its origin.

import { addToken, annotatedText } from './annotated.js';
import { MarkdownText } from './markdown.js';
import { addHtml } from './svg.js';
import { originsOf } from './trace.js';
import { visible } from './words.js';

/** @typedef {import('./trace.js').Trace} Trace */

const MOST_FRESH = 8; // tokens of a frame that appear with an animation; many at a time would make frames slow
const REDRAWN_EVERY = 120; // milliseconds between two drawings of a text whose threads are read in another order

/** The growing text of one answer, drawn at most once per frame. Texts of forked threads are not drawn as Markdown. */
export class GrowingText {
  /** @param {HTMLElement} parent @param {() => void} onDraw called after new text was drawn */
  constructor(parent, onDraw) {
    this._parent = parent;
    this._onDraw = onDraw;
    this._steps = 0; // shown
    this._length = 0; // characters of the shown steps
    this._drawnAt = 0;
    this._frame = 0;
    this._text = this._emptyText();
  }

  /** Show the steps that are new. @param {Trace} trace */
  grow(trace) {
    this._frame ||= requestAnimationFrame(() => {
      this._frame = 0;
      if (trace.threads.length < 2) this._append(trace, Number.POSITIVE_INFINITY);
      else if (performance.now() - this._drawnAt >= REDRAWN_EVERY) this._redraw(trace);
      else this.grow(trace);
      this._onDraw();
    });
  }

  /** Show the whole text of a finished answer; a stop string that its trace has is not part of it. @param {Trace} trace @param {string} text */
  finish(trace, text) {
    cancelAnimationFrame(this._frame);
    if (trace.threads.length < 2) {
      this._text = this._emptyText();
      this._append(trace, text.length);
    } else {
      this._redraw(trace);
      trim(this._parent, text);
    }
  }

  /** Show what a stopped answer has beyond the steps that are drawn, without origins. @param {string} text */
  stop(text) {
    cancelAnimationFrame(this._frame);
    if (this._drawnAt) return; // threads: their text is not in the order in which it came
    const rest = text.slice(this._length);
    if (rest) this._text.add(plainPiece(rest));
    this._text.draw();
  }

  /** Show text without origins. @param {string} text */
  plain(text) {
    cancelAnimationFrame(this._frame);
    this._parent.replaceChildren();
    drawMarkdown(addHtml(this._parent, 'div', { class: 'generated' }), text);
  }

  _emptyText() {
    this._steps = 0;
    this._length = 0;
    this._parent.replaceChildren();
    return new MarkdownText(addHtml(this._parent, 'div', { class: 'generated' }));
  }

  /** Add the steps that are new, up to a number of characters. @param {Trace} trace @param {number} most */
  _append(trace, most) {
    const isFirst = this._steps === 0;
    let [left, tokens, isNew] = [most, 0, true];
    for (; this._steps < trace.steps.length; this._steps += 1) {
      const step = this._steps + 1;
      for (const rows of trace.steps[this._steps].rows) {
        originsOf(rows).forEach((origin, index) => {
          const [token, text] = [rows.chosen[index], (rows.pieces[index] ?? '').slice(0, left)];
          left -= text.length;
          this._length += text.length;
          if (!text) return;
          tokens += 1;
          this._text.add({
            text,
            draw: (parent, part, isRest) => {
              const element = addToken(parent, trace, step, token, part, origin);
              if (isRest) element.classList.add('rest');
              else if (isNew && !isFirst && tokens <= MOST_FRESH) element.classList.add('fresh');
              return element;
            },
          });
        });
      }
    }
    this._text.draw();
    isNew = false;
  }

  /** @param {Trace} trace */
  _redraw(trace) {
    this._drawnAt = performance.now();
    this._parent.replaceChildren(annotatedText(trace));
  }
}

/** A message as it was typed; one with a code block as Markdown. @param {Element} parent @param {string} text */
export function drawQuestion(parent, text) {
  if (/^[ \t]*(```|~~~)/m.test(text)) drawMarkdown(addHtml(parent, 'div', { class: 'generated' }), text);
  else parent.textContent = visible(text);
}

/** @param {Element} parent @param {string} text */
function drawMarkdown(parent, text) {
  const drawn = new MarkdownText(parent);
  drawn.add(plainPiece(text));
  drawn.draw();
}

/** Text without an origin. @param {string} text @returns {import('./markdown.js').Piece} */
function plainPiece(text) {
  return { text, draw: (parent, part) => addHtml(parent, 'span', {}, visible(part)) };
}

/** Remove what comes after a text that the elements begin with. @param {Element} drawn @param {string} text */
function trim(drawn, text) {
  const tokens = [...drawn.querySelectorAll('b, i')];
  let left = visible(text).length;
  for (const token of tokens) {
    const shown = token.textContent ?? '';
    if (shown.length > left) token.textContent = shown.slice(0, left);
    if (left <= 0) token.remove();
    left -= shown.length;
  }
}
