// Lanes: a lane for each thread over the steps, with lines from each fork to its child thread.

import { LABELS, add, leftOf, path, picture, scaleForLanes, ticksOf, widthOf } from './svg.js';
import { acceptedIn, lanesOf, originsOf, rejectedIn } from './trace.js';
import { REASONS, counted, nameOf, nameOfThread, namesOf } from './words.js';

/** @typedef {import('./trace.js').Trace} Trace */
/** @typedef {import('./trace.js').Lane} Lane */
/** @typedef {import('./trace.js').Cell} Cell */
/** @typedef {import('./svg.js').Scale} Scale */

/**
 * @typedef {{ scale: Scale, thick: number, bases: Map<number, number>, bottoms: number[] }} Sheet
 *   The layout: height of a token, y of the line below the tokens of each thread, lower edge of each lane.
 */

const HUES = 6; // number of thread colours
const GAP = 5; // pixels between two columns, for the lines of forks
const STACK = 54; // maximum height of the tokens of a step
const THICKEST = 9; // height of a token
const THINNEST = 3;
const REJECTED = 12; // height of the box with the number of rejected candidates
const LOWEST = 42; // minimum height of a lane, for two lines of text
const AXIS = 24;

/** The names of the lanes and the lanes, as two drawings side by side. @param {Trace} trace */
export function drawLanes(trace) {
  const lanes = lanesOf(trace);
  const sheet = sheetOf(lanes, scaleForLanes(trace.steps.length));
  const height = (sheet.bottoms.at(-1) ?? AXIS) + AXIS;
  const names = picture(LABELS, height, 'The threads in reading order');
  const drawing = picture(widthOf(sheet.scale), height, 'The tokens of each thread in each step');
  drawGround(names, drawing, sheet);
  for (const lane of lanes) drawName(names, lane, sheet);
  for (const lane of lanes) drawLine(drawing, lane, sheet);
  for (const lane of lanes) {
    for (const cell of lane.cells) drawCell(drawing, trace, lane, cell, sheet);
  }
  return { names, drawing };
}

/** The CSS class with the colour of a thread; neighbouring lanes differ. @param {Lane} lane */
export function hueOf(lane) {
  return `t${lane.order % HUES}`;
}

/** The CSS class with the colour of a token's origin. @param {import('./trace.js').Origin} origin */
export function originClass(origin) {
  if (origin.source === 'model') return 'own';
  const places = origin.source === 'mask' || origin.source === 'head';
  if (places) return `mask m${Math.min(origin.depth, 4)}`;
  return origin.source === 'lookup' || origin.source === 'phrase' ? 'lookup' : 'several';
}

/** A token's origin in words. @param {import('./trace.js').Origin} origin */
export function originName(origin) {
  if (origin.source === 'model') return 'own token of the model';
  /** @type {Record<string, string>} */
  const places = { mask: `mask slot ${origin.depth}`, head: `head ${origin.depth}` };
  /** @type {Record<string, string>} */
  const names = { ...places, lookup: 'prompt lookup', phrase: 'phrases' };
  const sources = origin.source.split('+').map((name) => names[name] ?? name);
  return `accepted draft token: ${sources.join(' and ')}`;
}

/** The rows of a thread in a step as lines of text, for a tooltip. @param {Trace} trace @param {Cell} cell */
export function describe(trace, cell) {
  const { rows } = cell;
  const accepted = acceptedIn(rows);
  const lines = [`step ${cell.step}, ${nameOfThread(trace.threads[rows.thread])}`];
  const fed = trace.prompt.length - rows.positions[0];
  const kinds = /** @type {const} */ (['known', 'candidate', 'mask']).map(
    (kind) => /** @type {const} */ ([kind, rows.kinds.filter((each) => each === kind).length]),
  );
  if (fed > 0) lines.push(`prefill: ${counted(Math.min(fed, kinds[0][1]), 'token')} of the prompt`);
  if (accepted) lines.push(`accepted: ${namesOf(trace, rows.chosen.slice(0, accepted))}`);
  if (rows.generated > accepted) lines.push(`own token: ${namesOf(trace, rows.chosen.slice(accepted, rows.generated))}`);
  if (rows.chosen.length > rows.generated) {
    lines.push(`discarded after the end: ${namesOf(trace, rows.chosen.slice(rows.generated))}`);
  }
  const rejected = rejectedIn(rows).map((row) => `${nameOf(trace, rows.tokens[row])} (${rows.sources[row]})`);
  if (rejected.length) lines.push(`rejected: ${rejected.join(' ')}`);
  lines.push(`rows: ${kinds.flatMap(([kind, count]) => (count ? [`${count} ${kind}`] : [])).join(', ')}`);
  if (rows.limited) lines.push(`draft limited: ${REASONS[rows.limited]}`);
  if (cell.ending) lines.push(`ends: ${cell.ending}`);
  return lines.join('\n');
}

/** @param {Lane[]} lanes @param {Scale} scale @returns {Sheet} */
function sheetOf(lanes, scale) {
  const most = Math.max(1, ...lanes.map((lane) => lane.most));
  const thick = Math.min(THICKEST, Math.max(THINNEST, STACK / most));
  const bases = new Map();
  const bottoms = [];
  let end = AXIS;
  for (const lane of lanes) {
    const below = lane.cells.some((cell) => rejectedIn(cell.rows).length) ? REJECTED + 4 : 4;
    const above = Math.max(lane.most * thick, LOWEST - below - 12);
    bases.set(lane.thread, end + 8 + above);
    end += 8 + above + below + 4;
    bottoms.push(end);
  }
  return { scale, thick, bases, bottoms };
}

/** Bands for every other lane, grid lines and step numbers. @param {Element} names @param {Element} drawing @param {Sheet} sheet */
function drawGround(names, drawing, sheet) {
  const tops = [AXIS, ...sheet.bottoms];
  for (let index = 0; index < sheet.bottoms.length; index += 2) {
    const band = { y: tops[index], height: tops[index + 1] - tops[index], class: 'band' };
    add(names, 'rect', { ...band, x: 0, width: LABELS });
    add(drawing, 'rect', { ...band, x: 0, width: widthOf(sheet.scale) });
  }
  add(names, 'text', { x: LABELS - 8, y: AXIS - 8, class: 'axis last' }, 'step');
  const bottom = sheet.bottoms.at(-1) ?? AXIS;
  for (const step of ticksOf(sheet.scale)) {
    const x = leftOf(sheet.scale, step) + sheet.scale.column / 2 + GAP / 2;
    add(drawing, 'line', { x1: x, x2: x, y1: AXIS, y2: bottom, class: 'grid' });
    for (const y of [AXIS - 8, bottom + 15]) add(drawing, 'text', { x, y, class: 'axis' }, String(step));
  }
}

/** @param {Element} names @param {Lane} lane @param {Sheet} sheet */
function drawName(names, lane, sheet) {
  const x = 8 + 12 * Math.min(lane.depth, 5);
  const y = baseOf(sheet, lane.thread);
  const group = add(names, 'g', { id: `lane-${lane.thread}`, class: hueOf(lane) });
  add(group, 'rect', { x, y: y - 21, width: 9, height: 9, rx: 2, class: 'accepted' });
  add(group, 'text', { x: x + 14, y: y - 13, class: 'name' }, nameOfThread(lane.record));
  const ending = lane.record.ending ? ` · ${lane.record.ending}` : '';
  add(group, 'text', { x: x + 14, y: y + 1, class: 'axis first' }, `${counted(lane.generated, 'token')}${ending}`);
}

/** The line below a thread's tokens and the line from its fork. @param {Element} drawing @param {Lane} lane @param {Sheet} sheet */
function drawLine(drawing, lane, sheet) {
  const { scale } = sheet;
  const base = baseOf(sheet, lane.thread);
  const group = add(drawing, 'g', { class: `way ${hueOf(lane)}` });
  const first = lane.cells.length ? lane.cells[0].step : lane.forked + lane.queued + 1;
  if (lane.depth) {
    const parent = baseOf(sheet, lane.parent);
    const x = leftOf(scale, lane.forked + 1) + 1;
    const tip = leftOf(scale, first) + GAP;
    add(group, 'path', { d: path([[x, parent], [x, base]]), class: 'fork' });
    add(group, 'circle', { cx: x, cy: parent, r: 2, class: 'root' });
    if (lane.queued) add(group, 'path', { d: path([[x, base], [tip - 5, base]]), class: 'wait' });
    if (lane.cells.length) {
      const head = path([[tip, base], [tip - 5, base - 3.5], [tip - 5, base + 3.5]]);
      add(group, 'path', { d: `${head}Z`, class: 'root' });
    }
  }
  const last = lane.cells.at(-1);
  if (last) {
    const ends = path([[leftOf(scale, first) + GAP, base], [leftOf(scale, last.step + 1), base]]);
    add(group, 'path', { d: ends, class: 'life' });
  } else if (lane.record.ending) {
    drawEnd(group, leftOf(scale, first) + 1, base, sheet);
  }
}

/** The marks of a thread's tokens in a step, linked to their text. @param {Element} drawing @param {Trace} trace @param {Lane} lane @param {Cell} cell @param {Sheet} sheet */
function drawCell(drawing, trace, lane, cell, sheet) {
  const { rows } = cell;
  const base = baseOf(sheet, lane.thread);
  const x = leftOf(sheet.scale, cell.step) + GAP;
  const width = sheet.scale.column - GAP;
  const rejected = rejectedIn(rows).length;
  const group = add(drawing, rows.generated ? 'a' : 'g', { class: `cell ${hueOf(lane)}` });
  if (rows.generated) group.setAttribute('href', `#s${cell.step}-${lane.thread}`);
  add(group, 'title', {}, describe(trace, cell));
  const top = base - Math.max(2, rows.generated) * sheet.thick - 3;
  add(group, 'rect', { x: x - 2, y: top, width: width + 4, height: base + REJECTED + 5 - top, class: 'hit' });
  originsOf(rows).forEach((origin, index) => {
    const y = base - (index + 1) * sheet.thick;
    const inset = origin.source === 'model' ? 0.75 : 0; // half the width of its outline
    const box = { x: x + inset, y: y + inset, width: width - 2 * inset, height: sheet.thick - 1 - 2 * inset, rx: 1.5 };
    add(group, 'rect', { ...box, class: inset ? 'own' : 'accepted' });
    if (rows.chosen[index] === trace.tokens.fork) {
      const middle = { cx: x + width / 2, cy: y + (sheet.thick - 1) / 2 };
      add(group, 'circle', { ...middle, r: Math.min(2, sheet.thick / 3), class: 'forks' });
    }
  });
  if (!rows.chosen.length) {
    const height = 2 * sheet.thick;
    add(group, 'rect', { x, y: base - height, width, height: height - 1, class: 'prompt' });
  }
  if (rejected) {
    const box = { x: x + 0.5, y: base + 3.5, width: width - 1, height: REJECTED - 1, rx: 2 };
    add(group, 'rect', { ...box, class: 'rejected' });
    add(group, 'text', { x: x + width / 2, y: base + 12, class: 'count' }, String(rejected));
  }
  if (cell.ending) drawEnd(group, x + width + 1.5, base, sheet);
}

/** The bar at the end of a thread. @param {Element} group @param {number} x @param {number} base @param {Sheet} sheet */
function drawEnd(group, x, base, sheet) {
  add(group, 'path', { d: path([[x, base + 3], [x, base - Math.max(2 * sheet.thick, 12)]]), class: 'end' });
}

/** @param {Sheet} sheet @param {number} thread */
function baseOf(sheet, thread) {
  return sheet.bases.get(thread) ?? AXIS;
}
