// Settings: the options of requests, as the settings of the page say.

/** @typedef {import('./client.js').Options} Options */

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
