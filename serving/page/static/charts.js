// Charts: tokens, KV slots and time of each step of a generation.

import { LABELS, add, leftOf, path, picture, scaleForCharts, ticksOf, widthOf } from './svg.js';
import { acceptedIn, countsOf, slotsInOneThread } from './trace.js';
import { counted, number } from './words.js';

/** @typedef {import('./trace.js').Trace} Trace */
/** @typedef {import('./svg.js').Scale} Scale */
/** @typedef {{ title: string, legend: [string, string][], drawing: Element, note: string }} Chart */
/** @typedef {{ scale: Scale, every: number, lines: number }} Axes Steps to the right, amounts from 0 upward. */

const PLOT = 110; // pixels
const TOP = 14;
const BOTTOM = 22;
const UNITS = /** @type {const} */ ([[1, 's'], [1e-3, 'ms'], [1e-6, 'µs']]);
const OUTLIER = 2; // times the 95th percentile: longer bars are cut, so that the others stay readable

/** The charts of a generation. @param {Trace} trace @returns {Chart[]} */
export function chartsOf(trace) {
  const scale = scaleForCharts(trace.steps.length);
  return [tokensChart(trace, scale), slotsChart(trace, scale), secondsChart(trace, scale)];
}

/** @param {Trace} trace @param {Scale} scale @returns {Chart} */
function tokensChart(trace, scale) {
  const drafted = trace.steps.map((step) => sum(step.rows.map(acceptedIn)));
  const all = trace.steps.map((step) => sum(step.rows.map((rows) => rows.generated)));
  const axes = axesTo(scale, Math.max(0, ...all), 1);
  const drawing = frame(axes, 'Tokens of each step', '');
  all.forEach((both, index) => {
    const title = `step ${index + 1}: ${counted(both, 'token')}, ${drafted[index]} of them accepted draft tokens`;
    bars(drawing, axes, index + 1, [['drafted', 0, drafted[index]], ['network', drafted[index], both]], title);
  });
  const counts = countsOf(trace);
  const mean = counts.steps ? counts.tokens / counts.steps : 0;
  const right = LABELS + scale.steps * scale.column;
  add(drawing, 'path', { d: path([[LABELS, heightOf(axes, mean)], [right, heightOf(axes, mean)]]), class: 'mean' });
  return {
    title: 'Tokens per step',
    legend: [
      ['drafted', 'accepted draft tokens'],
      ['network', 'own tokens of the model'],
      ['mean', `mean: ${mean.toFixed(2)} tokens per step`],
    ],
    drawing,
    note: '',
  };
}

/** @param {Trace} trace @param {Scale} scale @returns {Chart} */
function slotsChart(trace, scale) {
  const held = trace.steps.map((step) => step.kv_slots);
  const plain = slotsInOneThread(trace);
  const axes = axesTo(scale, Math.max(0, ...held, ...plain), 1);
  const drawing = frame(axes, 'KV slots of each step', '');
  const outline = stairs(axes, held);
  if (outline.length) {
    const [left, right] = [outline[0][0], outline[outline.length - 1][0]];
    const floor = /** @type {[number, number][]} */ ([[right, heightOf(axes, 0)], [left, heightOf(axes, 0)]]);
    add(drawing, 'path', { d: `${path([...outline, ...floor])}Z`, class: 'area' });
    add(drawing, 'path', { d: path(outline), class: 'held' });
    add(drawing, 'path', { d: path(stairs(axes, plain)), class: 'line' });
  }
  held.forEach((slots, index) => {
    const title = `step ${index + 1}: ${counted(slots, 'KV slot')}, ${plain[index]} for the same tokens in one thread`;
    hit(drawing, axes, index + 1, title);
  });
  return {
    title: 'KV slots',
    legend: [
      ['held', `in use, including the rows of the step: peak ${Math.max(0, ...held)}`],
      ['line', `the same number of tokens in one thread, without drafts: peak ${Math.max(0, ...plain)}`],
    ],
    drawing,
    note: '',
  };
}

/** @param {Trace} trace @param {Scale} scale @returns {Chart} */
function secondsChart(trace, scale) {
  const engine = trace.steps.map((step) => step.engine_seconds);
  const both = trace.steps.map((step) => step.engine_seconds + step.outside_seconds);
  const most = Math.max(0, ...both);
  const usual = [...both].sort((one, other) => one - other)[Math.floor(0.95 * (both.length - 1))] ?? 0;
  const cut = usual > 0 && most > OUTLIER * usual;
  const [worth, unit] = UNITS.find(([each]) => (cut ? usual : most) >= each) ?? UNITS[2];
  const axes = axesTo(scale, (cut ? usual * 1.2 : most) / worth, 1e-9);
  const drawing = frame(axes, 'Time of each step', unit);
  let beyond = 0;
  both.forEach((all, index) => {
    const inside = engine[index];
    const outside = `${number((all - inside) / worth)} ${unit} outside of it`;
    const title = `step ${index + 1}: ${number(inside / worth)} ${unit} in the engine, ${outside}`;
    bars(drawing, axes, index + 1, [['engine', 0, inside / worth], ['outside', inside / worth, all / worth]], title);
    if (all / worth > topOf(axes)) {
      beyond += 1;
      const x = LABELS + leftOf(scale, index + 1) + scale.column / 2;
      const half = Math.min(5, scale.column / 2);
      const tip = path([[x, TOP - 9], [x - half, TOP - 2], [x + half, TOP - 2]]);
      add(drawing, 'path', { d: `${tip}Z`, class: 'beyond' });
    }
  });
  return {
    title: 'Time per step',
    legend: [
      ['engine', 'engine call'],
      ['outside', 'outside of the engine (planning, sampling, text)'],
    ],
    drawing,
    note: beyond ? `▲ ${beyond} longer than the axis, at most ${number(most / worth)} ${unit}` : '',
  };
}

/** An empty chart with grid lines, amounts and step numbers. @param {Axes} axes @param {string} label @param {string} unit */
function frame(axes, label, unit) {
  const { scale } = axes;
  const drawing = picture(LABELS + widthOf(scale), TOP + PLOT + BOTTOM, label);
  const right = LABELS + scale.steps * scale.column;
  for (let count = 0; count <= axes.lines; count += 1) {
    const amount = axes.every * count;
    const y = heightOf(axes, amount);
    add(drawing, 'line', { x1: LABELS, x2: right, y1: y, y2: y, class: 'grid' });
    add(drawing, 'text', { x: LABELS - 8, y: y + 4, class: 'axis last' }, `${Number(amount.toPrecision(6))} ${unit}`.trim());
  }
  for (const step of ticksOf(scale)) {
    const x = LABELS + leftOf(scale, step) + scale.column / 2;
    add(drawing, 'text', { x, y: TOP + PLOT + 15, class: 'axis' }, String(step));
  }
  return drawing;
}

/** The stacked bar of a step; each part runs from one amount to another. @param {Element} drawing @param {Axes} axes @param {number} step @param {[string, number, number][]} parts @param {string} title */
function bars(drawing, axes, step, parts, title) {
  const group = hit(drawing, axes, step, title);
  const gap = Math.min(5, axes.scale.column / 4);
  for (const [kind, begin, end] of parts) {
    const [top, bottom] = [heightOf(axes, end), heightOf(axes, begin)];
    if (bottom > top) {
      const x = LABELS + leftOf(axes.scale, step) + gap;
      add(group, 'rect', { x, width: axes.scale.column - gap, y: top, height: bottom - top, class: kind });
    }
  }
}

/** The hover area of a step, whose tooltip has its numbers. @param {Element} drawing @param {Axes} axes @param {number} step @param {string} title */
function hit(drawing, axes, step, title) {
  const group = add(drawing, 'g', { class: 'column' });
  add(group, 'title', {}, title);
  const x = LABELS + leftOf(axes.scale, step);
  add(group, 'rect', { x, width: axes.scale.column, y: TOP, height: PLOT, class: 'hit' });
  return group;
}

/** The points of a step line. @param {Axes} axes @param {number[]} amounts @returns {[number, number][]} */
function stairs(axes, amounts) {
  return amounts.flatMap((amount, index) =>
    [index + 1, index + 2].map(
      (step) => /** @type {[number, number]} */ ([LABELS + leftOf(axes.scale, step), heightOf(axes, amount)]),
    ),
  );
}

/** Axes up to `most`, with at most four grid lines at round amounts of at least `least`. @param {Scale} scale @param {number} most @param {number} least @returns {Axes} */
function axesTo(scale, most, least) {
  const every = most ? roundedUp(Math.max(most / 4, least)) : 1;
  return { scale, every, lines: Math.max(1, Math.ceil(most / every - 1e-9)) };
}

/** @param {Axes} axes */
function topOf(axes) {
  return axes.every * axes.lines;
}

/** @param {Axes} axes @param {number} amount */
function heightOf(axes, amount) {
  return TOP + PLOT * (1 - Math.min(amount, topOf(axes)) / topOf(axes));
}

/** The next of 1, 2, 5, 10, 20, ... @param {number} amount */
function roundedUp(amount) {
  const power = 10 ** Math.floor(Math.log10(amount));
  return ([1, 2, 5, 10].find((digit) => digit * power >= amount * (1 - 1e-9)) ?? 10) * power;
}

/** @param {number[]} amounts */
function sum(amounts) {
  return amounts.reduce((one, other) => one + other, 0);
}
