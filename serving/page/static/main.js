// Main: the page of a service: a chat whose answers show how they were decoded.

import { showAbilities } from './abilities.js';
import { GrowingText, drawQuestion } from './answers.js';
import { ServiceError, answer, models, useKey } from './client.js';
import { LiveView } from './live.js';
import { Runner, race } from './race.js';
import { Player, traceIn } from './replay.js';
import { drawReport } from './report.js';
import { keepSettings, optionsFrom, resetInvalid, restoreSettings, systemPrompt } from './settings.js';
import { addHtml } from './svg.js';
import { countsOf } from './trace.js';
import { counted, endingIn, number } from './words.js';

/** @typedef {import('./client.js').Message} Message */
/** @typedef {import('./trace.js').Trace} Trace */

const RETRY = 1000; // milliseconds until a service that opens its models is asked again
const STORED = 'spaceport.conversation';

/** @type {Message[]} */
let history = JSON.parse(sessionStorage.getItem(STORED) ?? '[]'); // a reload keeps it, the end of the window does not
/** @type {Map<string, import('./abilities.js').Model>} */
const known = new Map(); // models by name
/** @type {AbortController | null} */
let running = null;

/** @template {HTMLElement} T @param {string} id @param {new () => T} kind */
function find(id, kind) {
  const element = document.getElementById(id);
  if (!(element instanceof kind)) throw new Error(`the page has no ${id}`);
  return element;
}

const turns = find('turns', HTMLOListElement);
const welcome = find('welcome', HTMLElement);
const newChat = find('new', HTMLButtonElement);
const prompt = find('prompt', HTMLTextAreaElement);
const send = find('send', HTMLButtonElement);
const model = find('model', HTMLSelectElement);
const state = find('state', HTMLElement);
const watch = find('watch', HTMLElement);
const reportArea = find('report', HTMLElement);
const settings = find('settings', HTMLDialogElement);
const file = find('file', HTMLInputElement);

/** List the models; without a valid key, ask for one. */
async function connect() {
  try {
    const found = await models();
    model.replaceChildren(...found.map((each) => new Option(each.id, each.id)));
    for (const each of found) known.set(each.id, each);
    state.textContent = '';
    showChosen();
    turns.lastElementChild?.scrollIntoView({ block: 'end' });
  } catch (error) {
    state.textContent = messageOf(error);
    if (error instanceof ServiceError && error.status === 401) openSettings();
    if (error instanceof ServiceError && error.status === 503) setTimeout(connect, RETRY);
  }
}

function showChosen() {
  const chosen = known.get(model.value);
  if (chosen) showAbilities(chosen);
}

/** Answer what is typed. @param {string} text */
async function ask(text) {
  const options = { ...optionsFrom(), model: model.value, chats: known.get(model.value)?.has_chat_template ?? true };
  const racing = find('race', HTMLInputElement).checked;
  if (racing) Object.assign(options, { seed: options.seed ?? randomSeed(), fork: false, salt: crypto.randomUUID() });
  const { turn, growing, facts } = addTurn(text);
  const view = new LiveView(watch);
  const system = systemPrompt();
  const messages = [...(system ? [{ role: 'system', content: system }] : []), ...history, { role: 'user', content: text }];
  const track = racing ? /** @type {HTMLElement} */ (addHtml(turn, 'div', { class: 'race', 'aria-label': 'Race' })) : null;
  const drafted = track && new Runner(track, 'drafted');
  let [received, isKept] = ['', false];
  const keepReceived = () => {
    if (!received || isKept) return;
    keep([...history, { role: 'user', content: text }, { role: 'assistant', content: received }]);
    isKept = true;
  };
  window.addEventListener('pagehide', keepReceived);
  running = new AbortController();
  setRunning(true);
  turn.scrollIntoView({ block: 'end' });
  try {
    drafted?.start();
    const found = await answer(messages, options, running.signal, {
      onText: (piece) => {
        received += piece;
        drafted?.add(piece);
      },
      onGrowth: (growth) => {
        view.grow(growth);
        growing.grow(view.trace);
      },
    });
    drafted?.end();
    keepReceived();
    if (found.trace) {
      view.finish(found.trace);
      growing.finish(found.trace, found.text);
      addFacts(facts, found.trace, found.ending);
    } else {
      growing.plain(found.text);
    }
    if (track && drafted) {
      const { signal } = running;
      await race(track, drafted, async (plain) => {
        const salt = crypto.randomUUID();
        await answer(messages, { ...options, drafts: false, salt }, signal, { onText: (piece) => plain.add(piece) });
      });
    }
  } catch (error) {
    if (error instanceof DOMException) {
      if (!isKept) growing.stop(received);
      keepReceived();
      addHtml(facts, 'span', {}, 'stopped');
    } else {
      if (!isKept) prompt.value ||= text;
      addHtml(turn, 'p', { class: 'fault', role: 'alert' }, messageOf(error));
    }
  } finally {
    window.removeEventListener('pagehide', keepReceived);
    running = null;
    setRunning(false);
    keepInView();
  }
}

/** A question at the end of the chat, with room for its answer. @param {string} text */
function addTurn(text) {
  const origins = document.getElementById('origins');
  if (origins) turns.before(origins);
  welcome.hidden = true;
  const turn = addHtml(turns, 'li');
  drawQuestion(addHtml(turn, 'div', { class: 'asked' }), text);
  const shown = /** @type {HTMLElement} */ (addHtml(turn, 'div', { class: 'answered', 'aria-live': 'off' }));
  return { turn, growing: new GrowingText(shown, keepInView), facts: addHtml(turn, 'div', { class: 'facts' }) };
}

/** The conversation from now on. @param {Message[]} messages */
function keep(messages) {
  history = messages;
  sessionStorage.setItem(STORED, JSON.stringify(history));
}

/** Show the conversation that was there before the page was loaded again, without the origins of its tokens. */
function showKept() {
  for (let at = 0; at < history.length; at += 2) addTurn(history[at].content).growing.plain(history[at + 1].content);
}

/** The numbers of an answer, and a button for its report. @param {Element} facts @param {Trace} trace @param {string} ending */
function addFacts(facts, trace, ending) {
  const counts = countsOf(trace);
  const time = counts.engine + counts.outside;
  const perStep = counts.steps ? (counts.tokens / counts.steps).toFixed(2) : '0';
  addHtml(facts, 'span', {}, counted(counts.tokens, 'token'));
  addHtml(facts, 'span', {}, `${perStep} tokens per step`);
  if (time) addHtml(facts, 'span', {}, `${number(counts.tokens / time)} tokens/s`);
  const early = endingIn(ending);
  if (early) addHtml(facts, 'span', { class: 'early' }, early);
  const report = addHtml(facts, 'button', { type: 'button' }, 'Report');
  report.addEventListener('click', () => showReport(trace));
  const save = addHtml(facts, 'button', { type: 'button' }, 'Save trace');
  save.addEventListener('click', () => saveTrace(trace));
}

/** Show the report of a trace below the chat, with its replay. @param {Trace} trace */
function showReport(trace) {
  reportArea.hidden = false;
  reportArea.replaceChildren();
  const view = new LiveView(watch);
  view.finish(trace);
  const body = document.createElement('div');
  new Player(reportArea, trace, (shown) => {
    view.finish(shown);
    drawReport(body, shown);
  });
  reportArea.append(body);
  drawReport(body, trace);
  reportArea.scrollIntoView({ block: 'start' });
}

/** @param {Trace} trace */
function saveTrace(trace) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([JSON.stringify(trace)], { type: 'application/json' }));
  link.download = 'trace.json';
  link.click();
  URL.revokeObjectURL(link.href);
}

/** @param {boolean} now */
function setRunning(now) {
  send.textContent = now ? 'Stop' : 'Send';
  model.disabled = now;
  newChat.disabled = now;
}

function keepInView() {
  const talk = turns.parentElement;
  if (talk && talk.scrollHeight - talk.scrollTop - talk.clientHeight < 240) talk.scrollTop = talk.scrollHeight;
}

function openSettings() {
  settings.showModal();
}

function randomSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}

/** @param {unknown} error */
function messageOf(error) {
  return error instanceof Error ? error.message : String(error);
}

find('ask', HTMLFormElement).addEventListener('submit', (event) => {
  event.preventDefault();
  if (running) {
    running.abort();
    return;
  }
  const text = prompt.value.trim();
  if (!text) return;
  prompt.value = '';
  void ask(text);
});
prompt.addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) find('ask', HTMLFormElement).requestSubmit();
  }
});
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape' && running && !settings.open) running.abort();
});
newChat.addEventListener('click', () => {
  keep([]);
  turns.replaceChildren();
  welcome.children[0].after(find('origins', HTMLElement));
  welcome.hidden = false;
  prompt.focus();
});
find('options', HTMLButtonElement).addEventListener('click', openSettings);
settings.addEventListener('close', () => {
  resetInvalid(settings);
  keepSettings(settings);
  const key = find('key', HTMLInputElement);
  if (key.value) {
    useKey(key.value);
    key.value = '';
    void connect();
  }
});
find('open', HTMLButtonElement).addEventListener('click', () => file.click());
file.addEventListener('change', async () => {
  const [given] = file.files ?? [];
  file.value = '';
  if (!given) return;
  try {
    showReport(traceIn(await given.text()));
  } catch (error) {
    reportArea.hidden = false;
    reportArea.replaceChildren();
    addHtml(reportArea, 'p', { class: 'fault', role: 'alert' }, `${given.name}: ${messageOf(error)}`);
    reportArea.scrollIntoView({ block: 'start' });
  }
});
find('examples', HTMLElement).addEventListener('click', ({ target }) => {
  if (target instanceof HTMLButtonElement && !running) void ask(target.textContent ?? '');
});
model.addEventListener('change', showChosen);
restoreSettings(settings);
showKept();
void connect();
