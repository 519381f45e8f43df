// Settings: the options of requests, as the settings of the page say.

/** @typedef {import('./client.js').Options} Options */

const STORED = 'spaceport.settings';

/** The options that are set; the model and whether it chats are others. @returns {Options} */
export function optionsFrom() {
  return {
    model: '',
    maxTokens: numberIn('max-tokens') ?? 2048,
    temperature: numberIn('temperature') ?? 0,
    seed: numberIn('seed'),
    maskSlots: numberIn('mask-slots'),
    lookup: numberIn('lookup'),
    fork: isOn('fork'),
    drafts: isOn('drafts'),
    salt: null,
    chats: true,
  };
}

/** The system prompt, if there is one. */
export function systemPrompt() {
  const field = document.getElementById('system');
  return field instanceof HTMLTextAreaElement ? field.value.trim() : '';
}

/** Give numbers that are out of range their default again, so that the dialog shows what requests have. @param {Element} dialog */
export function resetInvalid(dialog) {
  for (const field of dialog.querySelectorAll('input')) if (!field.validity.valid) field.value = field.defaultValue;
}

/** Keep what a dialog says until the window is closed; keys are kept elsewhere. @param {Element} dialog */
export function keepSettings(dialog) {
  const values = fieldsOf(dialog).map((field) => [field.id, isSwitch(field) ? field.checked : field.value]);
  sessionStorage.setItem(STORED, JSON.stringify(Object.fromEntries(values)));
}

/** Give a dialog what it said before the page was loaded again. @param {Element} dialog */
export function restoreSettings(dialog) {
  const stored = JSON.parse(sessionStorage.getItem(STORED) ?? '{}');
  for (const field of fieldsOf(dialog)) {
    if (!(field.id in stored)) continue;
    if (isSwitch(field)) field.checked = stored[field.id];
    else field.value = stored[field.id];
  }
}

/** @param {Element} dialog @returns {(HTMLInputElement | HTMLTextAreaElement)[]} */
function fieldsOf(dialog) {
  return [...dialog.querySelectorAll('textarea'), ...dialog.querySelectorAll('input')].filter((field) => field.type !== 'password');
}

/** @param {HTMLElement} field @returns {field is HTMLInputElement} */
function isSwitch(field) {
  return field instanceof HTMLInputElement && field.type === 'checkbox';
}

/** @param {string} id */
function numberIn(id) {
  const field = document.getElementById(id);
  return field instanceof HTMLInputElement && !field.disabled && field.value !== '' && field.validity.valid ? field.valueAsNumber : null;
}

/** @param {string} id */
function isOn(id) {
  const field = document.getElementById(id);
  return field instanceof HTMLInputElement && !field.disabled && field.checked;
}
