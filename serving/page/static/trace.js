// Trace: what each step of a generation did, and what is counted from it. A trace may grow while it is drawn.

/**
 * @typedef {'known' | 'candidate' | 'mask'} RowKind
 * @typedef {string} Source The names of the sources of a candidate: mask, head, lookup, mask+lookup and so on.
 * @typedef {'budget' | 'not_worth_it' | 'no_candidates' | 'grammar' | 'end_of_text' | 'row_limit' | 'shared_call'} Reason
 *   Why a draft is narrower than its limits allow.
 * @typedef {{
 *   thread: number, anchor: number | null, tokens: number[], parents: (number | null)[], positions: number[],
 *   kinds: RowKind[], sources: (Source | null)[], retained: boolean[], chosen: number[], generated: number,
 *   pieces: string[], limited: Reason | null,
 * }} ThreadRows The rows of one thread in a step.
 * @typedef {{
 *   rows: ThreadRows[], queued: number[], started: number[], ended: number[], kv_slots: number,
 *   engine_seconds: number, outside_seconds: number,
 * }} StepRecord
 * @typedef {{ path: number[], fork: number | null, start: number, ending: string | null }} ThreadRecord
 * @typedef {{
 *   tokens: { mask: number[], fork: number | null, child: number | null, end: number[] },
 *   prompt: number[], prompt_text: string, threads: ThreadRecord[], steps: StepRecord[],
 *   texts: Record<string, string>, waiting_seconds: number, schema: number,
 * }} Trace The content of a trace file; docs/embedding.md describes it.
 * @typedef {{ depth: number, source: Source | 'model' }} Origin
 *   Where a token comes from: a draft token at a depth from 1 on, or the model itself, with depth 0.
 * @typedef {{ step: number, rows: ThreadRows, ending: string }} Cell
 *   The rows of a thread in a step; steps are counted from 1.
 * @typedef {{
 *   thread: number, record: ThreadRecord, cells: Cell[], parent: number, forked: number, queued: number, order: number,
 *   depth: number, generated: number, accepted: number, most: number,
 * }} Lane A thread with its rows in each step.
 * @typedef {{
 *   tokens: number, steps: number, promptSteps: number, rows: number,
 *   threads: number, peakThreads: number, peakSlots: number, engine: number, outside: number,
 *   byDepth: [number, number][], bySource: Map<string, [number, number]>, limited: Map<Reason, number>,
 * }} Counts Counts and times; `byDepth` and `bySource` have draft tokens and accepted ones, `limited` has steps.
 */

export const SCHEMA = 3;

/** A trace without steps. @returns {Trace} */
export function emptyTrace() {
  return {
    tokens: { mask: [], fork: null, child: null, end: [] },
    prompt: [],
    prompt_text: '',
    threads: [],
    steps: [],
    texts: {},
    waiting_seconds: 0,
    schema: SCHEMA,
  };
}

/** Number of generated tokens that were accepted draft tokens. @param {ThreadRows} rows */
export function acceptedIn(rows) {
  return Math.min(rows.generated, Math.max(0, rows.chosen.length - 1));
}

/** The rows of rejected candidates. @param {ThreadRows} rows */
export function rejectedIn(rows) {
  return candidatesIn(rows).filter((row) => !rows.retained[row]);
}

/** Position of the first token that a step can generate. @param {ThreadRows} rows */
export function firstPosition(rows) {
  return rows.positions[knownIn(rows) - 1] + 1;
}

/** Where each generated token of a thread in a step comes from. @param {ThreadRows} rows @returns {Origin[]} */
export function originsOf(rows) {
  const accepted = acceptedIn(rows);
  const retained = candidatesIn(rows).filter((row) => rows.retained[row]);
  return rows.chosen.slice(0, rows.generated).map((_, index) => {
    const source = index < accepted ? rows.sources[retained[index]] : null;
    return source ? { depth: index + 1, source } : { depth: 0, source: 'model' };
  });
}

/** Counts and times of all steps. @param {Trace} trace @returns {Counts} */
export function countsOf(trace) {
  /** @type {Counts} */
  const found = {
    ...{ tokens: 0, steps: 0, promptSteps: 0, rows: 0 },
    ...{ threads: trace.threads.length, peakThreads: 0, peakSlots: 0, engine: 0, outside: 0 },
    byDepth: [],
    bySource: new Map(),
    limited: new Map(),
  };
  for (const step of trace.steps) addStep(found, step);
  return found;
}

/** Add a step to counts. @param {Counts} found @param {StepRecord} step */
export function addStep(found, step) {
  found.peakSlots = Math.max(found.peakSlots, step.kv_slots);
  found.peakThreads = Math.max(found.peakThreads, step.rows.length);
  found.engine += step.engine_seconds;
  found.outside += step.outside_seconds;
  if (step.rows.some((rows) => rows.chosen.length)) found.steps += 1;
  else found.promptSteps += 1;
  for (const rows of step.rows) {
    found.rows += rows.tokens.length;
    found.tokens += rows.generated;
    if (rows.limited) found.limited.set(rows.limited, (found.limited.get(rows.limited) ?? 0) + 1);
    addDrafts(found, rows);
  }
}

/** KV slots after each step if one thread had generated the same tokens without drafts. @param {Trace} trace */
export function slotsInOneThread(trace) {
  let before = 0;
  return trace.steps.map((step) => {
    const root = before ? undefined : step.rows.find((rows) => rows.thread === 0);
    const fed = root ? Math.min(firstPosition(root), trace.prompt.length) : trace.prompt.length;
    const slots = fed + before;
    for (const rows of step.rows) {
      before += rows.chosen.slice(0, rows.generated).filter((token) => token !== trace.tokens.fork).length;
    }
    return slots;
  });
}

/** The threads in reading order: each one before its child threads. @param {Trace} trace @returns {Lane[]} */
export function lanesOf(trace) {
  const lanes = trace.threads.map((record, thread) => newLane(trace, record, thread));
  trace.steps.forEach((step, index) => {
    for (const rows of step.rows) {
      const ending = step.ended.includes(rows.thread) ? (trace.threads[rows.thread].ending ?? '') : '';
      const lane = lanes[rows.thread];
      lane.cells.push({ step: index + 1, rows, ending });
      lane.generated += rows.generated;
      lane.accepted += acceptedIn(rows);
      lane.most = Math.max(lane.most, rows.generated);
    }
    for (const thread of step.queued) lanes[thread].queued += 1;
    for (const thread of step.started) lanes[thread].forked = lanes[thread].depth ? index + 1 : 0;
  });
  lanes.sort((one, other) => comparePaths(one.record.path, other.record.path));
  lanes.forEach((lane, order) => {
    lane.order = order;
  });
  return lanes;
}

/** @param {Trace} trace @param {ThreadRecord} record @param {number} thread @returns {Lane} */
function newLane(trace, record, thread) {
  const above = record.path.slice(0, -1).join('.');
  const parent = record.path.length ? trace.threads.findIndex((other) => other.path.join('.') === above) : thread;
  const counts = { forked: 0, queued: 0, order: 0, generated: 0, accepted: 0, most: 0 };
  return { thread, record, cells: [], parent, depth: record.path.length, ...counts };
}

/** @param {number[]} one @param {number[]} other */
function comparePaths(one, other) {
  const index = one.findIndex((part, at) => part !== other[at]);
  if (index < 0) return one.length - other.length;
  return index < other.length ? one[index] - other[index] : 1;
}

/** @param {ThreadRows} rows */
function knownIn(rows) {
  return rows.kinds.filter((kind) => kind === 'known').length;
}

/** @param {ThreadRows} rows */
function candidatesIn(rows) {
  return rows.kinds.flatMap((kind, row) => (kind === 'candidate' ? [row] : []));
}

/** @param {Counts} found @param {ThreadRows} rows */
function addDrafts(found, rows) {
  const first = firstPosition(rows);
  const candidates = candidatesIn(rows);
  const accepted = new Set(candidates.filter((row) => rows.retained[row]).slice(0, acceptedIn(rows)));
  for (const row of candidates) {
    const depth = rows.positions[row] - first;
    while (found.byDepth.length <= depth) found.byDepth.push([0, 0]);
    const source = rows.sources[row] ?? '';
    const sums = found.bySource.get(source) ?? [0, 0];
    found.bySource.set(source, sums);
    for (const counts of [found.byDepth[depth], sums]) {
      counts[0] += 1;
      counts[1] += accepted.has(row) ? 1 : 0;
    }
  }
}
