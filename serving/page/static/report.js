// Report: everything about a finished generation: numbers, lanes, charts, tables and the annotated text.

import { annotatedText } from './annotated.js';
import { chartsOf } from './charts.js';
import { drawLanes } from './lanes.js';
import { add, addHtml, picture } from './svg.js';
import { countsOf, lanesOf, slotsInOneThread } from './trace.js';
import { REASONS, counted, nameOfThread, number, percent, seconds, visible } from './words.js';

/** @typedef {import('./trace.js').Trace} Trace */
/** @typedef {import('./trace.js').Counts} Counts */

/** @type {[string, string][]} */
const MARKS = [
  ['accepted', 'accepted draft token'],
  ['own', 'own token of the model'],
  ['forks', '[Fork] token'],
  ['rejected', 'number of rejected draft tokens'],
  ['wait', 'thread is queued'],
  ['prompt', 'prefill step'],
  ['end', 'end of a thread'],
];
/** @type {[string, string][]} */
const ORIGINS = [
  ['own', 'the model'],
  ['mask m1', 'mask slot or head 1'],
  ['mask m2', '2'],
  ['mask m3', '3'],
  ['mask m4', '4 and deeper'],
  ['lookup', 'prompt lookup, phrases'],
  ['several', 'several sources'],
];
const LINES = ['wait', 'mean', 'line', 'held'];
/** @type {Record<string, string>} */
const SOURCES = { mask: 'mask slots', head: 'heads', lookup: 'prompt lookup', phrase: 'phrases' };
const COLUMNS = [
  ...['thread', 'tokens', 'accepted draft tokens', 'steps', 'tokens per step'],
  ...['first step', 'last step', 'steps queued', 'ending'],
];

/** Draw the report of a trace into an element, which is emptied first. @param {Element} parent @param {Trace} trace */
export function drawReport(parent, trace) {
  parent.replaceChildren();
  const counts = countsOf(trace);
  drawPrompt(parent, trace);
  drawNumbers(parent, trace, counts);
  if (trace.steps.length) {
    drawThreads(parent, trace);
    drawCharts(parent, trace);
  } else {
    addHtml(parent, 'p', {}, 'No step was run.');
  }
  drawDrafts(parent, counts);
  if (trace.threads.length) {
    drawText(parent, trace);
    drawTable(parent, trace);
  }
}

/** A legend of origins, for text whose tokens are coloured by them. @param {Element} parent @param {boolean} predicted by mask slots or heads too */
export function drawOrigins(parent, predicted) {
  const list = addHtml(parent, 'ul', { class: 'legend origins' });
  for (const [kind, meaning] of ORIGINS) {
    if (!predicted && kind !== 'own' && kind !== 'lookup') continue;
    const item = addHtml(list, 'li');
    addHtml(item, 'span', { class: `chip ${kind}`, 'aria-hidden': 'true' });
    item.append(meaning);
  }
}

/** Numbers in boxes. @param {Element} parent @param {readonly (readonly [string, string, string])[]} numbers name, value and detail of each */
export function drawBoxes(parent, numbers) {
  const list = addHtml(parent, 'dl', { class: 'numbers' });
  for (const [name, value, detail] of numbers) {
    const box = addHtml(list, 'div');
    addHtml(box, 'dt', {}, name);
    const shown = addHtml(box, 'dd', {}, value);
    if (detail) addHtml(shown, 'small', {}, detail);
  }
}

/** Acceptance by depth and by source as tables. @param {Element} parent @param {Counts} counts */
export function drawShares(parent, counts) {
  const tables = addHtml(parent, 'div', { class: 'tables' });
  const byDepth = counts.byDepth.map((each, depth) => /** @type {const} */ ([String(depth + 1), each]));
  const sources = [...counts.bySource].sort(([one], [other]) => (one < other ? -1 : 1));
  const bySource = sources.map(([source, each]) => /** @type {const} */ ([sourceName(source), each]));
  for (const [caption, head, shares] of /** @type {const} */ ([
    ['By depth (position after the last verified token)', 'depth', byDepth],
    ['By source', 'source', bySource],
  ])) {
    if (!shares.length) continue;
    const body = table(scrolling(tables, caption), [head, 'drafted', 'accepted', 'acceptance rate'], caption);
    for (const [name, [drafted, accepted]] of shares) {
      const row = addHtml(body, 'tr');
      addHtml(row, 'th', { scope: 'row' }, name);
      const rate = Math.round((100 * accepted) / drafted);
      for (const value of [drafted, accepted]) addHtml(row, 'td', {}, String(value));
      const cell = addHtml(row, 'td', { class: 'rate' });
      addHtml(cell, 'span', {}, `${rate}%`);
      addHtml(cell, 'meter', { min: 0, max: 100, value: rate, 'aria-hidden': 'true' });
    }
  }
}

/** @param {Element} parent @param {Trace} trace */
function drawPrompt(parent, trace) {
  if (!trace.prompt_text) return;
  const details = addHtml(parent, 'details', trace.prompt_text.length < 400 ? { open: '' } : {});
  addHtml(details, 'summary', {}, `Prompt, ${counted(trace.prompt.length, 'token')}`);
  addHtml(details, 'div', { class: 'prompt-text' }, visible(trace.prompt_text));
}

/** @param {Element} parent @param {Trace} trace @param {Counts} counts */
function drawNumbers(parent, trace, counts) {
  const drafted = counts.byDepth.reduce((sum, [count]) => sum + count, 0);
  const accepted = counts.byDepth.reduce((sum, [, count]) => sum + count, 0);
  const steps = counts.steps + counts.promptSteps;
  const time = counts.engine + counts.outside;
  const waited = trace.waiting_seconds ? `, queued for ${seconds(trace.waiting_seconds)} before` : '';
  const plain = Math.max(0, ...slotsInOneThread(trace));
  drawBoxes(parent, [
    ['Generated tokens', String(counts.tokens), `after ${counted(trace.prompt.length, 'prompt token')}`],
    ['Steps', String(counts.steps), counts.promptSteps ? `and ${counted(counts.promptSteps, 'prefill step')}` : ''],
    ['Tokens per step', (counts.steps ? counts.tokens / counts.steps : 0).toFixed(2), 'plain decoding: 1'],
    ['Threads', String(counts.threads), `at most ${counts.peakThreads} at once`],
    ['Acceptance rate', percent(accepted, drafted), `${accepted} of ${counted(drafted, 'draft token')} accepted`],
    ['Rows', String(counts.rows), steps ? `${(counts.rows / steps).toFixed(1)} per step` : ''],
    ['Peak KV slots', String(counts.peakSlots), `${plain} in one thread without drafts`],
    ['Time', seconds(time), time ? `${number(counts.tokens / time)} tokens/s` : ''],
    ['Engine time', seconds(counts.engine), `${percent(counts.engine, time)}${waited}`],
    ['Time outside the engine', seconds(counts.outside), steps ? `${seconds(counts.outside / steps)} per step` : ''],
  ]);
}

/** @param {Element} parent @param {Trace} trace */
function drawThreads(parent, trace) {
  const section = headed(parent, 'Threads');
  const note = addHtml(section, 'p', { class: 'quiet' }, 'One lane per thread, one column per decode step. Hover over ');
  note.append('a column to see its tokens; click it to find them in ');
  addHtml(note, 'a', { href: '#text' }, 'the text');
  note.append('.');
  drawLegend(section, MARKS, 't0');
  const lanes = addHtml(section, 'div', { class: 'lanes' });
  const { names, drawing } = drawLanes(trace);
  lanes.append(names);
  scrolling(lanes, 'Lanes').append(drawing);
}

/** @param {Element} parent @param {Trace} trace */
function drawCharts(parent, trace) {
  const section = headed(parent, 'Steps');
  for (const chart of chartsOf(trace)) {
    const figure = addHtml(section, 'figure');
    const caption = addHtml(figure, 'figcaption');
    addHtml(caption, 'b', {}, chart.title);
    drawLegend(caption, chart.legend, '', chart.note);
    scrolling(figure, chart.title).append(chart.drawing);
  }
}

/** @param {Element} parent @param {Counts} counts */
function drawDrafts(parent, counts) {
  const section = headed(parent, 'Draft tokens');
  if (counts.byDepth.length) drawShares(section, counts);
  else addHtml(section, 'p', {}, 'No draft tokens.');
  if (!counts.limited.size) return;
  const label = 'why a draft was narrower than its limits';
  const body = table(scrolling(section, label), [label, 'steps']);
  for (const [reason, steps] of [...counts.limited].sort(([, one], [, other]) => other - one)) {
    const row = addHtml(body, 'tr');
    addHtml(row, 'th', { scope: 'row' }, REASONS[reason]);
    addHtml(row, 'td', {}, String(steps));
  }
}

/** @param {Element} parent @param {Trace} trace */
function drawText(parent, trace) {
  const section = headed(parent, 'Text');
  section.id = 'text';
  addHtml(section, 'p', { class: 'quiet' }, 'In reading order: each child thread is at the position of its [Fork].');
  drawOrigins(section, [...countsOf(trace).bySource.keys()].some((source) => source !== 'lookup'));
  section.append(annotatedText(trace));
}

/** @param {Element} parent @param {Trace} trace */
function drawTable(parent, trace) {
  const section = headed(parent, 'Statistics by thread');
  const body = table(scrolling(section, 'Statistics by thread'), COLUMNS);
  for (const lane of lanesOf(trace)) {
    const row = addHtml(body, 'tr');
    const steps = lane.cells.map((cell) => cell.step);
    const perStep = steps.length ? (lane.generated / steps.length).toFixed(2) : '–';
    const ends = [steps[0] ?? '–', steps.at(-1) ?? '–'];
    const values = [lane.generated, lane.accepted, steps.length, perStep, ...ends, lane.queued];
    addHtml(row, 'th', { scope: 'row' }, nameOfThread(lane.record));
    for (const value of [...values, lane.record.ending ?? 'running']) addHtml(row, 'td', {}, String(value));
  }
}

/** Marks with their meaning. @param {Element} parent @param {[string, string][]} meanings @param {string} colour @param {string} [note] */
function drawLegend(parent, meanings, colour, note) {
  const list = addHtml(parent, 'ul', { class: `legend ${colour}`.trim() });
  for (const [kind, meaning] of meanings) {
    const item = addHtml(list, 'li');
    item.append(mark(kind), meaning);
  }
  if (note) addHtml(list, 'li', {}, note);
}

/** The mark of a CSS class as a small picture. @param {string} kind */
function mark(kind) {
  const drawing = picture(20, 12, '');
  drawing.removeAttribute('role');
  drawing.removeAttribute('aria-label');
  drawing.setAttribute('aria-hidden', 'true');
  if (LINES.includes(kind)) add(drawing, 'path', { d: 'M0 6 H20', class: kind });
  else if (kind === 'end') add(drawing, 'path', { d: 'M10 0 V12', class: kind });
  else if (kind === 'forks') add(drawing, 'circle', { cx: 10, cy: 6, r: 2.5, class: kind });
  else add(drawing, 'rect', { x: 1, y: 1, width: 18, height: 10, rx: 1.5, class: kind });
  if (kind === 'rejected') add(drawing, 'text', { x: 10, y: 9, class: 'count' }, '3');
  return drawing;
}

/** A section with a heading. @param {Element} parent @param {string} heading */
function headed(parent, heading) {
  const section = addHtml(parent, 'section');
  addHtml(section, 'h2', {}, heading);
  return section;
}

/** An area that scrolls sideways. @param {Element} parent @param {string} label */
function scrolling(parent, label) {
  return addHtml(parent, 'div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': label });
}

/** The body of a new table. @param {Element} parent @param {readonly string[]} heads @param {string} [caption] */
function table(parent, heads, caption) {
  const whole = addHtml(parent, 'table');
  if (caption) addHtml(whole, 'caption', {}, caption);
  const row = addHtml(addHtml(whole, 'thead'), 'tr');
  for (const head of heads) addHtml(row, 'th', { scope: 'col' }, head);
  return addHtml(whole, 'tbody');
}

/** @param {string} source */
function sourceName(source) {
  return source
    .split('+')
    .map((name) => SOURCES[name] ?? name)
    .join(' + ');
}
