// Answers: the text of an answer while it grows, each token coloured by its origin.

import { addToken, annotatedText } from './annotated.js';
import { originsOf } from './trace.js';

/** @typedef {import('./trace.js').Trace} Trace */

const MOST_FRESH = 8; // tokens of a frame that appear with an animation; many at a time would make frames slow
const REDRAWN_EVERY = 120; // milliseconds between two drawings of a text whose threads are read in another order

/** The growing text of one answer, drawn at most once per frame. */
export class GrowingText {
  /** @param {HTMLElement} parent @param {() => void} onDraw called after new text was drawn */
  constructor(parent, onDraw) {
    this._parent = parent;
    this._onDraw = onDraw;
    this._steps = 0; // shown
    this._drawnAt = 0;
    this._frame = 0;
    this._text = document.createElement('div');
    this._text.className = 'generated';
    parent.replaceChildren(this._text);
  }

  /** Show the steps that are new. @param {Trace} trace */
  grow(trace) {
    this._frame ||= requestAnimationFrame(() => {
      this._frame = 0;
      if (trace.threads.length < 2) this._append(trace);
      else if (performance.now() - this._drawnAt >= REDRAWN_EVERY) this._redraw(trace);
      else this.grow(trace);
      this._onDraw();
    });
  }

  /** Show the whole text of a finished answer; a stop string that its trace has is not part of it. @param {Trace} trace @param {string} text */
  finish(trace, text) {
    cancelAnimationFrame(this._frame);
    const drawn = annotatedText(trace);
    this._parent.replaceChildren(drawn);
    trim(drawn, text);
  }

  /** Show text without origins. @param {string} text */
  plain(text) {
    cancelAnimationFrame(this._frame);
    this._text.textContent = text;
  }

  /** @param {Trace} trace */
  _append(trace) {
    /** @type {Element[]} */
    const added = [];
    for (; this._steps < trace.steps.length; this._steps += 1) {
      for (const rows of trace.steps[this._steps].rows) {
        originsOf(rows).forEach((origin, index) => {
          const [token, piece] = [rows.chosen[index], rows.pieces[index]];
          if (piece) added.push(addToken(this._text, trace, this._steps + 1, token, piece, origin));
        });
      }
    }
    if (added.length <= MOST_FRESH) for (const token of added) token.classList.add('fresh');
  }

  /** @param {Trace} trace */
  _redraw(trace) {
    this._drawnAt = performance.now();
    this._text = annotatedText(trace);
    this._parent.replaceChildren(this._text);
  }
}

/** Remove what comes after a text that the elements begin with. @param {Element} drawn @param {string} text */
function trim(drawn, text) {
  const tokens = [...drawn.querySelectorAll('b, i')];
  let left = text.length;
  for (const token of tokens) {
    const shown = token.textContent ?? '';
    if (shown.length > left) token.textContent = shown.slice(0, left);
    if (left <= 0) token.remove();
    left -= shown.length;
  }
}
