// Live: the decoding of one answer while it runs: numbers, a bar for each step, acceptance by depth, slots and lanes.

import { drawLanes, originClass } from './lanes.js';
import { add, addHtml, path, picture } from './svg.js';
import { addStep, countsOf, emptyTrace, originsOf } from './trace.js';
import { REASONS, counted, number } from './words.js';

/** @typedef {import('./trace.js').Trace} Trace */
/** @typedef {import('./trace.js').StepRecord} StepRecord */
/** @typedef {import('./client.js').Growth} Growth */

const BAR = 9; // pixels of a step
const TALLEST = 64; // pixels of the highest stack of tokens
const DEEPEST = 44; // pixels of the most rows
const SLOTS = 56; // pixels of the chart of KV slots
const LANES_EVERY = 400; // milliseconds between two drawings of the lanes while they grow
const MOST_DEPTHS = 8;
const MOST_BARS = 400; // of the last steps, while an answer grows
const MOST_POINTS = 300; // of the chart of KV slots

/** The decoding of one answer, drawn at most once per frame. */
export class LiveView {
  /** @param {Element} parent emptied first */
  constructor(parent) {
    parent.replaceChildren();
    this.trace = emptyTrace();
    this.counts = countsOf(this.trace);
    this.started = performance.now();
    this.seconds = 0; // since the first step
    this._first = 0; // first step with a bar
    this._drawn = 0; // steps up to the last one with a bar
    this._over = false;
    this._lanesAt = 0;
    this._frame = 0;
    this._most = { tokens: 4, rows: 8 };
    this._numbers = boxes(parent, ['Tokens per second', 'Tokens per step', 'Draft tokens accepted', 'Rows per step']);
    this._bars = panel(parent, 'Steps', 'Each step: tokens generated above the line, rows computed below it.');
    this._strip = addHtml(this._bars, 'div', { class: 'strip scroll', tabindex: 0, role: 'region', 'aria-label': 'Steps' });
    this._drawing = picture(0, TALLEST + DEEPEST, 'Tokens generated and rows computed in each step');
    this._strip.append(this._drawing);
    this._depths = addHtml(panel(parent, 'Acceptance by depth', ''), 'div', { class: 'depths' });
    this._slots = panel(parent, 'KV slots in use', '');
    this._lanes = panel(parent, 'Threads', 'Forked threads decode side by side; each sees the text up to its fork.');
    this._lanes.hidden = true;
  }

  /** Add new steps. @param {Growth} growth */
  grow(growth) {
    if (!this.trace.steps.length) this.started = performance.now();
    this.trace.threads.push(...growth.threads);
    Object.assign(this.trace.texts, growth.texts);
    for (const step of growth.steps) {
      this.trace.steps.push(step);
      addStep(this.counts, step);
    }
    this.seconds = (performance.now() - this.started) / 1000;
    this._ask();
  }

  /** Show a finished trace, which has all steps and how each thread ended. @param {Trace} trace */
  finish(trace) {
    this.trace = trace;
    this.counts = countsOf(trace);
    this._over = true;
    this._first = this._drawn = 0;
    this._drawing.replaceChildren();
    this.seconds = this.counts.engine + this.counts.outside;
    this._lanesAt = 0;
    this._ask();
  }

  _ask() {
    this._frame ||= requestAnimationFrame(() => {
      this._frame = 0;
      this._draw();
    });
  }

  _draw() {
    const { counts } = this;
    const drafted = counts.byDepth.reduce((sum, [count]) => sum + count, 0);
    const accepted = counts.byDepth.reduce((sum, [, count]) => sum + count, 0);
    const steps = counts.steps + counts.promptSteps;
    const values = [
      this.seconds ? number(counts.tokens / this.seconds) : '–',
      counts.steps ? (counts.tokens / counts.steps).toFixed(2) : '–',
      drafted ? `${accepted} of ${drafted}` : '–',
      steps ? (counts.rows / steps).toFixed(1) : '–',
    ];
    values.forEach((value, index) => {
      this._numbers[index].textContent = value;
    });
    this._drawBars();
    this._drawDepths();
    this._drawSlots();
    this._drawLanes();
  }

  _drawBars() {
    const follows = this._strip.scrollLeft + this._strip.clientWidth >= this._strip.scrollWidth - 2 * BAR;
    const { steps } = this.trace;
    const fresh = steps.slice(this._drawn);
    const tokens = Math.max(this._most.tokens, ...fresh.map(tokensIn));
    const rows = Math.max(this._most.rows, ...fresh.filter(generates).map(rowsIn));
    if (tokens > this._most.tokens || rows > this._most.rows) {
      this._most = { tokens, rows };
      this._drawing.replaceChildren();
      this._drawn = this._first;
    }
    const first = this._over ? 0 : Math.max(0, steps.length - MOST_BARS);
    for (; this._first < first && this._first < this._drawn; this._first += 1) this._drawing.firstChild?.remove();
    this._first = first;
    this._drawn = Math.max(this._drawn, first);
    const count = Math.max(1, steps.length - first);
    const size = { width: count * BAR, viewBox: `${first * BAR} 0 ${count * BAR} ${TALLEST + DEEPEST}` };
    for (const [name, value] of Object.entries(size)) this._drawing.setAttribute(name, String(value));
    for (; this._drawn < steps.length; this._drawn += 1) this._drawBar(steps[this._drawn], this._drawn);
    if (follows) this._strip.scrollLeft = this._strip.scrollWidth;
  }

  /** @param {StepRecord} step @param {number} index */
  _drawBar(step, index) {
    const group = add(this._drawing, 'g', { class: 'column' });
    const [x, width] = [index * BAR, BAR - 2];
    const kinds = ['known', 'candidate', 'mask'].map(
      (kind) => step.rows.flatMap((rows) => rows.kinds).filter((each) => each === kind).length,
    );
    const title = `step ${index + 1}: ${counted(tokensIn(step), 'token')}, ${counted(rowsIn(step), 'row')}`;
    const limits = step.rows.flatMap(({ limited }) => (limited ? [`\ndraft limited: ${REASONS[limited]}`] : []));
    const details = `(${kinds[0]} known, ${kinds[1]} candidates, ${kinds[2]} masks)${[...new Set(limits)].join('')}`;
    add(group, 'title', {}, `${title} ${details}`);
    add(group, 'rect', { x, y: 0, width: BAR, height: TALLEST + DEEPEST, class: 'hit' });
    const thick = TALLEST / this._most.tokens;
    let y = TALLEST;
    for (const origin of step.rows.flatMap(originsOf)) {
      y -= thick;
      add(group, 'rect', { x, y: y + 0.5, width, height: Math.max(1, thick - 1), rx: 1, class: `token ${originClass(origin)}` });
    }
    const classes = ['known', 'candidate', 'mask-row'];
    let below = TALLEST + 2;
    const each = (DEEPEST - 4) / (generates(step) ? this._most.rows : Math.max(this._most.rows, rowsIn(step)));
    kinds.forEach((count, kind) => {
      if (count) add(group, 'rect', { x, y: below, width, height: count * each, class: `rows ${classes[kind]}` });
      below += count * each;
    });
  }

  _drawDepths() {
    const shares = this.counts.byDepth.slice(0, MOST_DEPTHS);
    if (!shares.length) {
      this._depths.textContent = 'No draft tokens yet.';
      return;
    }
    if (this._depths.childElementCount !== shares.length) {
      this._depths.replaceChildren();
      shares.forEach((_, depth) => {
        const row = addHtml(this._depths, 'div', { class: 'depth' });
        addHtml(row, 'span', {}, String(depth + 1));
        addHtml(row, 'meter', { min: 0, max: 1, value: 0, 'aria-label': `Acceptance at depth ${depth + 1}` });
        addHtml(row, 'span', { class: 'share' });
      });
    }
    shares.forEach(([drafted, accepted], depth) => {
      const [, meter, share] = this._depths.children[depth].children;
      /** @type {HTMLMeterElement} */ (meter).value = accepted / drafted;
      share.textContent = `${Math.round((100 * accepted) / drafted)}% of ${drafted}`;
    });
  }

  _drawSlots() {
    const { steps } = this.trace;
    const every = Math.max(1, Math.ceil(steps.length / MOST_POINTS));
    const held = steps.filter((_, index) => index % every === 0 || index === steps.length - 1).map((step) => step.kv_slots);
    const width = Math.max(1, this._slots.clientWidth);
    const most = Math.max(1, this.counts.peakSlots);
    const points = held.map(
      (slots, index) =>
        /** @type {[number, number]} */ ([(index * width) / Math.max(1, held.length - 1), SLOTS * (1 - slots / most)]),
    );
    const drawing = picture(width, SLOTS + 2, `KV slots in use: at most ${most}`);
    if (points.length > 1) {
      add(drawing, 'path', { d: `${path([...points, [width, SLOTS], [0, SLOTS]])}Z`, class: 'area' });
      add(drawing, 'path', { d: path(points), class: 'held' });
    }
    const label = addHtml(this._slots, 'span', { class: 'quiet' }, held.length ? `${held.at(-1)} now, peak ${most}` : '');
    this._slots.replaceChildren(this._slots.children[0], label, drawing);
  }

  _drawLanes() {
    if (this.trace.threads.length < 2) return;
    const now = performance.now();
    if (now - this._lanesAt < LANES_EVERY) {
      setTimeout(() => this._ask(), LANES_EVERY);
      return;
    }
    this._lanesAt = now;
    this._lanes.hidden = false;
    const { names, drawing } = drawLanes(this.trace);
    const lanes = document.createElement('div');
    lanes.className = 'lanes';
    const scroll = addHtml(lanes, 'div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': 'Threads' });
    lanes.prepend(names);
    scroll.append(drawing);
    this._lanes.querySelector('.lanes')?.remove();
    this._lanes.append(lanes);
    scroll.scrollLeft = scroll.scrollWidth;
  }
}

/** Boxes for numbers; returns the elements of the values. @param {Element} parent @param {string[]} names */
function boxes(parent, names) {
  const list = addHtml(parent, 'dl', { class: 'numbers' });
  return names.map((name) => {
    const box = addHtml(list, 'div');
    addHtml(box, 'dt', {}, name);
    return addHtml(box, 'dd', {}, '–');
  });
}

/** A part of the view with a heading. @param {Element} parent @param {string} heading @param {string} note */
function panel(parent, heading, note) {
  const section = /** @type {HTMLElement} */ (addHtml(parent, 'section', { class: 'panel' }));
  const title = addHtml(section, 'h2', {}, heading);
  if (note) title.setAttribute('title', note);
  if (note) addHtml(section, 'p', { class: 'quiet small' }, note);
  return section;
}

/** @param {StepRecord} step */
function tokensIn(step) {
  return step.rows.reduce((sum, rows) => sum + rows.generated, 0);
}

/** @param {StepRecord} step */
function rowsIn(step) {
  return step.rows.reduce((sum, rows) => sum + rows.tokens.length, 0);
}

/** @param {StepRecord} step */
function generates(step) {
  return step.rows.some((rows) => rows.chosen.length > 0);
}
