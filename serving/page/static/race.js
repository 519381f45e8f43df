// Race: the same prompt and seed with drafts and without, each with its clock, and whether the texts are identical.

import { addHtml } from './svg.js';
import { counted } from './words.js';

/** One runner: its text, and how long it has run; the bars of two runners have lengths of time on one scale. */
export class Runner {
  /** @param {Element} parent @param {string} name */
  constructor(parent, name) {
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
  }

  /** Note the end. */
  end() {
    this.ended = performance.now() - this.started;
  }

  /** Draw the time that had passed. @param {number} at milliseconds since its start @param {number} scale milliseconds of a full bar */
  draw(at, scale) {
    const time = this.ended ? Math.min(at, this.ended) : at;
    this._bar.max = scale;
    this._bar.value = time;
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
    const expected = plain.text ? (at * drafted.text.length) / plain.text.length : 0; // time of the whole text at this speed
    for (const each of [drafted, plain]) each.draw(at, Math.max(at, drafted.ended, expected));
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
  for (const each of [drafted, plain]) each.draw(each.ended, Math.max(drafted.ended, plain.ended));
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
