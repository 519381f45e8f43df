// Abilities: what the chosen model can do, and the parts of the page that follow from it.

import { drawOrigins } from './report.js';
import { addHtml } from './svg.js';

/** @typedef {{ id: string, root: string, has_chat_template: boolean, spaceport: { mask_slots: number, heads: number, fork: boolean } }} Model */

const CODE = [
  'Add type hints: def mean(values): return sum(values) / len(values)',
  'Write a Python class Stack with push, pop and peek.',
  'Write a test for a function that reverses a string.',
];
const BEGINNINGS = ['import json\n\ndef', 'The capital of France is', 'Once upon a time'];
const QUESTIONS = ['Explain the parameters of sorted( iterable, key = None )', 'What does a compiler do?'];
const LIST = 'List five ways to save energy at home.';

/** Whether mask slots or heads predict tokens. @param {Model} model */
function predicts({ spaceport }) {
  return spaceport.mask_slots + spaceport.heads > 0;
}

/** Show what a model can do: the welcome with prompts that suit it, and the settings that it has. @param {Model} model */
export function showAbilities(model) {
  const able = predicts(model);
  const welcome = document.getElementById('welcome');
  const origins = document.getElementById('origins');
  const examples = document.getElementById('examples');
  if (origins) {
    origins.replaceChildren();
    drawOrigins(origins, able);
  }
  if (welcome && examples) {
    const how = able ? 'the model drafts for itself' : 'tokens are drafted from the text before them (prompt lookup)';
    welcome.children[0].textContent = `Ask something, and watch how ${how}.`;
    examples.replaceChildren();
    for (const prompt of promptsFor(model)) addHtml(examples, 'button', { type: 'button' }, prompt);
  }
  allow('mask-slots', able, `0 to ${model.spaceport.mask_slots + model.spaceport.heads}`, 'this model has neither mask slots nor heads');
  allow('fork', model.spaceport.fork, '', 'this model has no fork token');
}

/** @param {Model} model */
function promptsFor(model) {
  if (!model.has_chat_template) return BEGINNINGS;
  if (/code/i.test(`${model.id} ${model.root}`)) return CODE;
  return model.spaceport.fork ? [QUESTIONS[0], LIST, QUESTIONS[1]] : QUESTIONS;
}

/** Enable a setting, or say why the model does not have it. @param {string} id @param {boolean} able @param {string} range @param {string} reason */
function allow(id, able, range, reason) {
  const field = document.getElementById(id);
  if (!(field instanceof HTMLInputElement)) return;
  field.disabled = !able;
  const note = field.parentElement?.querySelector('small');
  if (note) note.textContent = able ? range : reason;
}
