// Annotated text: the text of all threads in reading order, each token coloured by its origin.

import { hueOf, originClass, originName } from './lanes.js';
import { addHtml } from './svg.js';
import { lanesOf, originsOf } from './trace.js';
import { nameOf, nameOfThread, visible } from './words.js';

/** @typedef {import('./trace.js').Trace} Trace */
/** @typedef {import('./trace.js').Lane} Lane */

/** The text with each child thread at its [Fork], and a link target for each thread and step. @param {Trace} trace */
export function annotatedText(trace) {
  const text = document.createElement('div');
  text.className = 'generated';
  const lanes = lanesOf(trace);
  const children = new Map(lanes.filter((lane) => lane.depth).map((lane) => [`${lane.parent}:${lane.record.fork}`, lane]));
  if (lanes.length) write(text, trace, lanes[0], children);
  return text;
}

/** Add a token with its origin. @param {Element} parent @param {Trace} trace @param {number} step @param {number} token @param {string} text @param {import('./trace.js').Origin} origin */
export function addToken(parent, trace, step, token, text, origin) {
  const title = `step ${step}: ${nameOf(trace, token)}, ${originName(origin)}`;
  return addHtml(parent, origin.source === 'model' ? 'i' : 'b', { title, class: originClass(origin) }, visible(text));
}

/** @param {Element} parent @param {Trace} trace @param {Lane} lane @param {Map<string, Lane>} children */
function write(parent, trace, lane, children) {
  let text = begin(parent, lane);
  let position = lane.record.start;
  for (const { step, rows } of lane.cells) {
    let run = addHtml(text, 'span', { id: `s${step}-${lane.thread}` });
    originsOf(rows).forEach((origin, index) => {
      const token = rows.chosen[index];
      addToken(run, trace, step, token, rows.pieces.length ? rows.pieces[index] : `${nameOf(trace, token)} `, origin);
      const child = children.get(`${lane.thread}:${position}`);
      if (child) {
        write(parent, trace, child, children);
        text = addHtml(parent, 'span', { class: hueOf(lane) });
        run = addHtml(text, 'span');
      }
      position += 1;
    });
  }
}

/** The start of a thread: for a child thread, a link to its lane. @param {Element} parent @param {Lane} lane */
function begin(parent, lane) {
  const text = addHtml(parent, 'span', { class: hueOf(lane) });
  if (lane.depth) {
    const title = `start of ${nameOfThread(lane.record)}`;
    addHtml(text, 'a', { class: 'child', href: `#lane-${lane.thread}`, title }, lane.record.path.join('.'));
  }
  return text;
}
