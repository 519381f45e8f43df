// Replay: a recorded trace, shown again step by step at the speed at which it ran.

import { addHtml } from './svg.js';
import { SCHEMA } from './trace.js';
import { number, seconds } from './words.js';

/** @typedef {import('./trace.js').Trace} Trace */

const SPEEDS = [0.25, 0.5, 1, 2, 4];

/** The trace in a file's text; raises with what is wrong. @param {string} text @returns {Trace} */
export function traceIn(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error('The file is not JSON: expected a trace written by spaceport generate --trace.');
  }
  const lists = ['prompt', 'threads', 'steps'];
  if (typeof found !== 'object' || found === null || !lists.every((name) => Array.isArray(found[name]))) {
    throw new Error('The file is no trace: expected one written by spaceport generate --trace.');
  }
  if (found.schema !== SCHEMA) {
    throw new Error(`The trace has schema ${found.schema}: expected ${SCHEMA}. Write it again with spaceport generate.`);
  }
  return found;
}

/** The beginning of a trace: its first steps and the threads that they started. @param {Trace} trace @param {number} steps @returns {Trace} */
export function beginning(trace, steps) {
  if (steps >= trace.steps.length) return trace;
  const first = trace.steps.slice(0, steps);
  const threads = Math.max(0, ...first.flatMap((step) => step.started.map((thread) => thread + 1)));
  const open = trace.threads.slice(0, threads).map((thread, index) => {
    return first.some((step) => step.ended.includes(index)) ? thread : { ...thread, ending: null };
  });
  return { ...trace, threads: open, steps: first };
}

/** Buttons and a slider that show the beginnings of a trace in turn. */
export class Player {
  /** @param {Element} parent @param {Trace} trace @param {(trace: Trace) => void} show */
  constructor(parent, trace, show) {
    this._trace = trace;
    this._show = show;
    this._ends = endsOf(trace); // seconds from the start to the end of each step
    this._at = 0; // seconds
    this._last = 0; // time of the last frame; 0: paused
    const bar = addHtml(parent, 'div', { class: 'player', role: 'group', 'aria-label': 'Replay' });
    this._button = /** @type {HTMLButtonElement} */ (addHtml(bar, 'button', { type: 'button' }, 'Play'));
    const slider = { type: 'range', min: 0, max: trace.steps.length, step: 1, value: trace.steps.length, 'aria-label': 'Step' };
    this._slider = /** @type {HTMLInputElement} */ (addHtml(bar, 'input', slider));
    this._label = addHtml(bar, 'span', { class: 'clock' });
    const label = addHtml(bar, 'label', {}, 'Speed ');
    this._speed = /** @type {HTMLSelectElement} */ (addHtml(label, 'select'));
    for (const speed of SPEEDS) addHtml(this._speed, 'option', { value: speed }, `${speed}×`);
    this._speed.value = '1';
    this._button.addEventListener('click', () => (this._last ? this.pause() : this.play()));
    this._slider.addEventListener('input', () => {
      this.pause();
      this._go(Number(this._slider.value));
    });
    this._write(trace.steps.length);
  }

  /** Go on from the current step, or from the start after the last one. */
  play() {
    if (Number(this._slider.value) >= this._trace.steps.length) this._go(0);
    this._last = performance.now();
    this._button.textContent = 'Pause';
    requestAnimationFrame((now) => this._tick(now));
  }

  /** Stop at the current step. */
  pause() {
    this._last = 0;
    this._button.textContent = 'Play';
  }

  /** @param {number} now */
  _tick(now) {
    if (!this._last) return;
    this._at += (Math.max(0, now - this._last) / 1000) * Number(this._speed.value);
    this._last = now;
    const reached = this._ends.findIndex((end) => end > this._at);
    const step = reached < 0 ? this._trace.steps.length : reached;
    if (step !== Number(this._slider.value)) this._move(step);
    if (step >= this._trace.steps.length) this.pause();
    else requestAnimationFrame((next) => this._tick(next));
  }

  /** @param {number} step */
  _go(step) {
    this._at = step ? this._ends[step - 1] : 0;
    this._move(step);
  }

  /** @param {number} step */
  _move(step) {
    this._slider.value = String(step);
    this._write(step);
    this._show(beginning(this._trace, step));
  }

  /** @param {number} step */
  _write(step) {
    const time = step ? this._ends[step - 1] : 0;
    this._label.textContent = `step ${number(step)} of ${this._trace.steps.length}, ${seconds(time)}`;
  }
}

/** @param {Trace} trace */
function endsOf(trace) {
  let at = 0;
  return trace.steps.map((step) => {
    at += step.engine_seconds + step.outside_seconds;
    return at;
  });
}
