// Client: requests to the service that serves the page.

/** @typedef {import('./trace.js').Trace} Trace */
/** @typedef {{ role: string, content: string }} Message */
/**
 * @typedef {{
 *   model: string, maxTokens: number, temperature: number, seed: number | null, maskSlots: number | null,
 *   lookup: number | null, fork: boolean, drafts: boolean, salt: string | null, chats: boolean,
 * }} Options
 * @typedef {Pick<Trace, 'steps' | 'threads' | 'texts'>} Growth New steps of a running request.
 * @typedef {{ text: string, ending: string, trace: Trace | null, seed: number | null }} Answer
 */

const KEY = 'spaceport.key';

/** An error that the service reported, or a connection that failed. */
export class ServiceError extends Error {
  /** @param {string} message @param {number} status 0: no connection */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Store the key that the service asks for until the window is closed. @param {string} key */
export function useKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** The models of the service. @returns {Promise<import('./abilities.js').Model[]>} */
export async function models() {
  const response = await request('v1/models');
  return (await response.json()).data;
}

/**
 * The answer to messages; `onText` and `onGrowth` are called with what is new while it is generated.
 * @param {Message[]} messages @param {Options} options @param {AbortSignal} signal
 * @param {{ onText?: (text: string) => void, onGrowth?: (growth: Growth) => void }} calls @returns {Promise<Answer>}
 */
export async function answer(messages, options, signal, { onText, onGrowth } = {}) {
  const body = JSON.stringify({ ...textOf(messages, options), ...bodyOf(options) });
  const response = await request(options.chats ? 'v1/chat/completions' : 'v1/completions', { body, signal });
  /** @type {Answer} */
  const found = { text: '', ending: '', trace: null, seed: null };
  for await (const event of eventsOf(response)) {
    if (event.error) throw new ServiceError(event.error.message, 500);
    for (const choice of event.choices ?? []) {
      const text = choice.delta?.content ?? choice.text ?? '';
      const own = choice.spaceport ?? {};
      if (text) {
        found.text += text;
        onText?.(text);
      }
      if (own.steps) onGrowth?.(own);
      if (own.ending) Object.assign(found, { ending: own.ending, trace: own.trace ?? null, seed: own.seed ?? null });
    }
  }
  return found;
}

/** The messages, or for a model without a chat template the last one, which it continues. @param {Message[]} messages @param {Options} options */
function textOf(messages, options) {
  return options.chats ? { messages } : { prompt: messages[messages.length - 1].content };
}

/** @param {Options} options */
function bodyOf(options) {
  return {
    ...{ model: options.model, stream: true, max_tokens: options.maxTokens },
    temperature: options.temperature,
    ...(options.seed === null ? {} : { seed: options.seed }),
    ...(options.salt === null ? {} : { cache_salt: options.salt }),
    spaceport: {
      ...{ fork: options.fork, trace: true },
      ...(options.drafts ? {} : { mask_slots: 0, lookup: 0 }),
      ...(options.maskSlots === null || !options.drafts ? {} : { mask_slots: options.maskSlots }),
      ...(options.lookup === null || !options.drafts ? {} : { lookup: options.lookup }),
    },
  };
}

/** @param {string} path @param {RequestInit} [more] */
async function request(path, more) {
  const key = sessionStorage.getItem(KEY);
  const headers = { 'content-type': 'application/json', ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { method: more ? 'POST' : 'GET', headers, ...more });
  } catch (error) {
    if (error instanceof DOMException && error.name === 'AbortError') throw error;
    throw new ServiceError('The service does not answer: is it still running?', 0);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ServiceError(body?.error?.message ?? `${response.status} ${response.statusText}`, response.status);
}

/** The events of a stream until `[DONE]`. @param {Response} response @returns {AsyncGenerator<any>} */
async function* eventsOf(response) {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const events = (waiting + value).split('\n\n');
    waiting = events.pop() ?? '';
    for (const event of events) {
      if (!event.startsWith('data: ')) continue; // a comment that keeps the connection open
      if (event === 'data: [DONE]') return;
      yield JSON.parse(event.slice(6));
    }
  }
  throw new ServiceError('The connection ended before the answer did.', 0);
}
