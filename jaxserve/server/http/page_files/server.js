// Requests to the server that this page came from, with its token.

const KEY = "jaxserve-token";

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

// A refusal in the server's words. status: "429 Too Many Requests"; kind: its code.
export class Refusal extends Error {
  constructor(message, status, kind, retryAfter) {
    super(message);
    Object.assign(this, { status, kind, retryAfter });
  }

  get needsToken() {
    return this.status.startsWith("401");
  }
}

export async function get(path, signal) {
  return send(path, { signal });
}

export async function post(path, body, signal) {
  const headers = { "content-type": "application/json" };
  return send(path, { method: "POST", body: JSON.stringify(body), headers, signal });
}

async function send(path, options) {
  const authorization = token.get() ? { authorization: `Bearer ${token.get()}` } : {};
  const headers = { ...options.headers, ...authorization };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (!response.ok) throw await refusalOf(response);
  return response;
}

async function refusalOf(response) {
  const text = await response.text();
  const status = `${response.status} ${response.statusText}`.trim();
  const error = parsed(text)?.error;
  const wait = Number(response.headers.get("retry-after")) || null;
  return error ? new Refusal(error.message, status, error.code, wait) : new Refusal(text || status, status, "", wait);
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

// Yields the data of server-sent events until [DONE] or the stream's end; throws an error among them.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        yield eventOf(JSON.parse(data));
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // a caller that stops early ends the request
  }
}

function eventOf(said) {
  if (said.error) throw new Refusal(said.error.message, said.error.type, said.error.code);
  return said;
}
