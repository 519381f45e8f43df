// Report file: draws the report of the trace that its HTML file has, with a replay.

import { Player } from './replay.js';
import { drawReport } from './report.js';

const area = document.getElementById('report');
const stored = document.getElementById('trace')?.textContent;
if (area && stored) {
  const trace = JSON.parse(stored);
  const body = document.createElement('div');
  area.replaceChildren();
  if (trace.steps.length) new Player(area, trace, (shown) => drawReport(body, shown));
  area.append(body);
  drawReport(body, trace);
}
