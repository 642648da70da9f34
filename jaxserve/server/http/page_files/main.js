// Starts the page: asks for a token if the server needs one, then opens the live stream and the playground.

import { $ } from "./dom.js";
import { count, parameters } from "./format.js";
import { LiveView } from "./live.js";
import { Playground } from "./playground.js";
import { events, get, token } from "./server.js";

const RETRY = [1, 2, 4, 8]; // seconds
const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));

const live = new LiveView($("live"));
let watching = null; // AbortController of the live stream

async function watch() {
  for (let failures = 0; ; ) {
    await shown();
    watching = new AbortController();
    try {
      for await (const message of events(await get("live", watching.signal))) {
        failures = 0;
        told(message);
      }
    } catch (error) {
      if (error.needsToken) await ask(error);
      else if (error.name !== "AbortError") lost(error);
    }
    await pause(RETRY[Math.min(failures++, RETRY.length - 1)]);
  }
}

// A hidden page closes its stream, so that it costs the server nothing.
function shown() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

document.addEventListener("visibilitychange", () => document.hidden && watching?.abort());

function told(message) {
  $("live-problem").hidden = true;
  $("live").classList.remove("stale");
  phase(message.phase);
  if (!message.engine) return;
  $("live").hidden = false;
  live.show(message);
  introduce(message);
}

function lost(error) {
  if (!error.status) console.error(error);
  phase(error.status ? "refused" : "not connected");
  $("live").classList.add("stale");
  $("live-problem").hidden = false;
  const unreachable = "The server cannot be reached; trying again.";
  $("live-problem").textContent = error.status ? `${error.status}: ${error.message}` : unreachable;
}

function phase(name) {
  if ($("phase").dataset.phase === name) return;
  $("phase").dataset.phase = name;
  $("phase").textContent = name;
}

function introduce({ model, engine }) {
  document.title = `${model.name} · jaxserve`;
  $("model-name").textContent = model.name;
  const mesh = Object.entries(engine.mesh).filter(([, size]) => size > 1).map(([axis, size]) => `${axis} ${size}`);
  const facts = [model.architecture, parameters(model.parameters), model.weights, `context ${count(model.max_context)}`];
  $("model-facts").textContent = [...facts, [engine.device, ...mesh].join(", ")].join(" · ");
}

async function served() {
  for (;;) {
    try {
      const { data } = await (await get("v1/models")).json();
      return data[0];
    } catch (error) {
      if (error.needsToken) await ask(error);
      else await wait(error);
    }
  }
}

function wait(error) {
  $("no-play").hidden = !error.status;
  $("no-play").textContent = `${error.status}: ${error.message}`;
  return pause(Math.min(error.retryAfter ?? 2, 2));
}

function open(model) {
  const numbers = model.embedding_dimensions;
  $("forget").hidden = !token.get();
  $("no-play").hidden = !numbers;
  $("no-play").textContent =
    `${model.id} makes embeddings of ${count(numbers)} numbers (POST /v1/embeddings), no text: this is its live view.`;
  if (numbers) document.body.dataset.view = "only";
  else new Playground(model, (error) => error.needsToken && ask(error));
}

// All callers that need a token share one dialog; each tries the token with its own request.
let asking = null;

function ask(error) {
  asking ??= asked(error).finally(() => (asking = null));
  return asking;
}

async function asked(error) {
  const wrong = token.get() !== null;
  $("ask-problem").hidden = !wrong;
  $("ask-problem").textContent = `${error.status}: ${error.message}`;
  $("ask-token").value = "";
  while (!$("ask-token").value.trim()) {
    $("ask").showModal();
    await new Promise((resolve) => $("ask").addEventListener("close", resolve, { once: true }));
  }
  token.set($("ask-token").value.trim());
}

$("forget").addEventListener("click", () => {
  token.forget();
  location.reload();
});

for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.show;
    for (const each of document.querySelectorAll("[data-show]")) each.setAttribute("aria-pressed", each === button);
  });
}

watch();
open(await served());
