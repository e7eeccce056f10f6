/** Speaks to this page's own server; owns the API key, which lives in this tab alone. */

const STORED_KEY = "jaxserve-api-key";

/** The server wants a key, or another one. */
export class KeyNeeded extends Error {}

export function setKey(key) {
  sessionStorage.setItem(STORED_KEY, key);
}

export function hasKey() {
  return sessionStorage.getItem(STORED_KEY) !== null;
}

/** Fetches a path of the server, `v1/models` say, wherever a proxy has put it; throws what the server says is wrong. */
export async function ask(path, { signal, body } = {}) {
  const key = sessionStorage.getItem(STORED_KEY);
  const headers = { ...(key && { Authorization: `Bearer ${key}` }), ...(body && { "Content-Type": "application/json" }) };
  const response = await fetch(new URL(`../${path}`, import.meta.url), {
    method: body ? "POST" : "GET",
    headers,
    body: body && JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "same-origin",
  });
  if (response.ok) return response;
  const message = await response
    .json()
    .then((reply) => reply.error.message)
    .catch(() => `the server answered ${response.status}`);
  throw response.status === 401 ? new KeyNeeded(message) : new Error(message);
}
