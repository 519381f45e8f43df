// Svg: elements of drawings, and the x positions of steps.

const NAMESPACE = 'http://www.w3.org/2000/svg';

export const LABELS = 172; // pixels left of a drawing for labels
const WIDTH = 980; // pixels of all steps together, if they fit
const WIDEST = 48; // pixels of a step in the lanes
const NARROWEST = 16;

/** @typedef {Record<string, string | number>} Attributes */
/** @typedef {{ steps: number, column: number }} Scale A column of equal width for each step; steps are counted from 1. */

/** Add an SVG element. @param {Element} parent @param {string} name @param {Attributes} attributes @param {string} [text] */
export function add(parent, name, attributes, text) {
  const element = document.createElementNS(NAMESPACE, name);
  setAll(element, attributes);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

/** Add an HTML element. @param {Element} parent @param {string} name @param {Attributes} attributes @param {string} [text] */
export function addHtml(parent, name, attributes = {}, text) {
  const element = document.createElement(name);
  setAll(element, attributes);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

/** A new drawing with a size and a label for screen readers. @param {number} width @param {number} height @param {string} label */
export function picture(width, height, label) {
  const drawing = document.createElementNS(NAMESPACE, 'svg');
  const size = { width: rounded(width), height: rounded(height), viewBox: `0 0 ${rounded(width)} ${rounded(height)}` };
  setAll(drawing, { ...size, role: 'img', 'aria-label': label });
  return drawing;
}

/** The outline of some points. @param {readonly (readonly [number, number])[]} points */
export function path(points) {
  return points.map(([x, y], index) => `${index ? 'L' : 'M'}${rounded(x)} ${rounded(y)}`).join('');
}

/** Columns wide enough to distinguish tokens, so that many steps are wider than the page. @param {number} steps @returns {Scale} */
export function scaleForLanes(steps) {
  return { steps, column: Math.min(WIDEST, Math.max(NARROWEST, Math.floor(WIDTH / Math.max(1, steps)))) };
}

/** The columns of the lanes if they fit on the page, otherwise narrower ones. @param {number} steps @returns {Scale} */
export function scaleForCharts(steps) {
  return { steps, column: Math.min(scaleForLanes(steps).column, WIDTH / Math.max(1, steps)) };
}

/** Width of all columns. @param {Scale} scale */
export function widthOf(scale) {
  return scale.steps * scale.column + 8;
}

/** The left edge of a step's column. @param {Scale} scale @param {number} step */
export function leftOf(scale, step) {
  return (step - 1) * scale.column;
}

/** The steps that are labelled with their number. @param {Scale} scale */
export function ticksOf(scale) {
  const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((count) => count * scale.column >= 30) ?? 1e6;
  return Array.from({ length: Math.floor(scale.steps / every) }, (_, index) => (index + 1) * every);
}

/** @param {Element} element @param {Attributes} attributes */
function setAll(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    element.setAttribute(name, typeof value === 'number' ? String(rounded(value)) : value);
  }
}

/** @param {number} value */
function rounded(value) {
  return Math.round(value * 100) / 100;
}
