// Race: the same prompt and seed with drafts and without, each with its clock, and whether the texts are identical.

import { addHtml } from './svg.js';
import { counted } from './words.js';

/** @typedef {{ at: number, characters: number }} Mark How much text was there after some milliseconds. */

/** One runner: the times at which its text grew. */
export class Runner {
  /** @param {Element} parent @param {string} name */
  constructor(parent, name) {
    /** @type {Mark[]} */
    this.marks = [];
    this.text = '';
    this.started = 0;
    this.ended = 0;
    const row = addHtml(parent, 'div', { class: 'runner' });
    addHtml(row, 'span', { class: 'who' }, name);
    this._bar = /** @type {HTMLProgressElement} */ (addHtml(row, 'progress', { max: 1, value: 0, 'aria-label': name }));
    this._clock = addHtml(row, 'span', { class: 'clock' }, '0.0 s');
  }

  /** Begin now. */
  start() {
    this.started = performance.now();
  }

  /** Note new text. @param {string} text */
  add(text) {
    this.text += text;
    this.marks.push({ at: performance.now() - this.started, characters: this.text.length });
  }

  /** Note the end. */
  end() {
    this.ended = performance.now() - this.started;
  }

  /** Draw what was there at a time. @param {number} at milliseconds since its start @param {number} whole characters of the complete text */
  draw(at, whole) {
    const time = this.ended ? Math.min(at, this.ended) : at;
    const reached = this.marks.findLast((mark) => mark.at <= time)?.characters ?? 0;
    this._bar.max = Math.max(1, whole, this.text.length);
    this._bar.value = reached;
    this._clock.textContent = `${(time / 1000).toFixed(1)} s`;
  }
}

/**
 * Run a race and report it in an element. The drafted answer has run already; while the plain one runs, it is shown again
 * beside it, since two requests at one time would share each step.
 * @param {HTMLElement} parent with the drafted runner's row @param {Runner} drafted @param {(plain: Runner) => Promise<void>} runPlain
 */
export async function race(parent, drafted, runPlain) {
  const plain = new Runner(parent, 'plain');
  let frame = 0;
  const draw = () => {
    const at = performance.now() - plain.started;
    drafted.draw(at, drafted.text.length);
    plain.draw(at, drafted.text.length);
    frame = requestAnimationFrame(draw);
  };
  plain.start();
  draw();
  try {
    await runPlain(plain);
  } finally {
    cancelAnimationFrame(frame);
    if (!plain.ended) plain.end();
  }
  for (const each of [drafted, plain]) each.draw(each.ended, drafted.text.length);
  const result = addHtml(parent, 'p', { class: 'result', role: 'status' });
  if (plain.text === drafted.text) {
    addHtml(result, 'strong', { class: 'identical' }, '✓ identical');
    result.append(`, ${(plain.ended / drafted.ended).toFixed(2)} times as fast with drafts`);
  } else {
    const [one, other] = [[...plain.text], [...drafted.text]];
    const differs = one.findIndex((character, index) => character !== other[index]);
    addHtml(result, 'strong', { class: 'different' }, '✗ different');
    result.append(` after ${counted(differs < 0 ? one.length : differs, 'character')}`);
  }
}
