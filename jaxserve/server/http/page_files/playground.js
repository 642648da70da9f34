// The playground: one form, one conversation, one request at a time.

import { Answer } from "./answer.js";
import { $, el } from "./dom.js";
import { count, rate, seconds } from "./format.js";
import { Popover } from "./popover.js";
import { events, post } from "./server.js";

const HINTS = {
  chat: "Ask something. Answers come as the engine makes them; point at a word to see what else it could have been.",
  completion: "Begin a text, and the model goes on with it.",
};
const SPOKEN = 1500; // milliseconds between two parts of text for screen readers

export class Playground {
  #messages = []; // the chat so far
  #answers = [];
  #running = null; // AbortController of the running request
  #atEnd = true; // the transcript is scrolled to its end
  #following = 0; // id of the animation frame that scrolls the transcript

  // `refused` is called with every refusal.
  constructor(model, refused) {
    this.model = model;
    this.refused = refused;
    this.form = $("play");
    this.popover = new Popover($("transcript"), (span) => this.#token(span));
    $("chat-mode").hidden = !model.has_chat_template;
    this.form.elements.mode.value = model.has_chat_template ? "chat" : "completion";
    this.#listen();
    this.clear();
    this.form.hidden = false;
    $("prompt").focus({ preventScroll: true });
  }

  #listen() {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.form.requestSubmit();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      this.popover.hide();
      this.stop();
    });
    $("transcript").addEventListener("scroll", ({ target: box }) => {
      this.#atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    }, { passive: true });
    $("stop").addEventListener("click", () => this.stop());
    $("clear").addEventListener("click", () => this.clear());
    for (const radio of this.form.elements.mode) radio.addEventListener("change", () => this.clear());
    $("colors").addEventListener("change", () => this.#color());
    $("probabilities").addEventListener("change", () => this.#color());
    this.#color();
  }

  get chats() {
    return this.form.elements.mode.value === "chat";
  }

  stop() {
    this.#running?.abort();
  }

  clear() {
    this.stop();
    this.#messages = [];
    this.#answers = [];
    const hint = el("p", { class: "hint" }, HINTS[this.form.elements.mode.value]);
    $("transcript").replaceChildren(hint);
    $("system-field").hidden = !this.chats;
    $("prompt").placeholder = this.chats ? `Ask ${this.model.id}` : "Once upon a time";
  }

  async send() {
    const prompt = $("prompt").value;
    if (this.#running || !prompt.trim()) return;
    $("prompt").value = "";
    $("transcript").querySelector(".hint")?.remove();
    const turn = this.chats ? this.#chatTurn(prompt) : this.#completionTurn(prompt);
    $("transcript").append(...turn.elements);
    this.#answers.push(turn.answer);
    await this.#run(turn);
  }

  #chatTurn(prompt) {
    const asked = { role: "user", content: prompt };
    const system = $("system").value.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.#messages, asked];
    const answer = new Answer(el("div", { class: "text" }));
    const question = turn("You", el("div", { class: "text" }, prompt));
    const reply = turn(this.model.id, answer.element);
    question.classList.add("user");
    const conversation = this.#messages; // clearing the chat makes a new array
    const keep = () => conversation.push(asked, { role: "assistant", content: answer.text });
    const body = { messages, separate_reasoning: false }; // tokens cover the reasoning too
    return { path: "v1/chat/completions", body, answer, reply, elements: [question, reply], keep };
  }

  #completionTurn(prompt) {
    const answer = new Answer(el("span"));
    const text = el("div", { class: "text" }, el("span", { class: "given" }, prompt), answer.element);
    const reply = el("div", { class: "turn" }, text);
    return { path: "v1/completions", body: { prompt }, answer, reply, elements: [reply], keep() {} };
  }

  async #run({ path, body, answer, reply, keep }) {
    this.#turn(new AbortController());
    this.#atEnd = true;
    this.#follow();
    const [clock, speech] = [new Clock(), new Speech($("spoken"))];
    reply.classList.add("running");
    try {
      const options = { stream: true, stream_options: { include_usage: true } };
      const response = await post(path, { ...body, ...options, ...this.#sampling() }, this.#running.signal);
      for await (const event of events(response)) {
        for (const choice of event.choices) speech.say(clock.see(answer.push(choice), choice));
        clock.usage = event.usage ?? clock.usage;
        this.#follow();
      }
      keep();
    } catch (error) {
      if (error.name !== "AbortError") this.#fail(reply, error);
      else {
        clock.reason = "stopped by you";
        keep();
      }
    } finally {
      reply.classList.remove("running");
      reply.append(el("p", { class: "small facts" }, clock.facts(answer)));
      this.#follow();
      speech.end();
      this.#turn(null);
    }
  }

  // Returns only the fields that were set: the server has the defaults, and refuses what it cannot do.
  #sampling() {
    const inputs = [...this.form.querySelectorAll("input[inputmode][name]")].filter((input) => input.value.trim());
    const body = Object.fromEntries(inputs.map((input) => [input.name, number(input.value)]));
    const stop = $("stop-strings").value.split("\n").filter(Boolean);
    if (stop.length) body.stop = stop;
    const top = number($("alternatives").value);
    if (!$("probabilities").checked) return body;
    return { ...body, ...(this.chats ? { logprobs: true, top_logprobs: top } : { logprobs: top }) };
  }

  #fail(reply, error) {
    const status = [error.status, error.kind].filter(Boolean).join(" · ");
    const lines = [el("strong", {}, status || "The connection broke off"), el("span", {}, error.message)];
    reply.append(el("p", { class: "error", role: "alert" }, ...lines));
    this.refused(error);
  }

  // Keeps the end in view unless the user scrolled away, once a frame: a layout for each token is expensive.
  #follow() {
    if (!this.#atEnd || this.#following) return;
    this.#following = requestAnimationFrame(() => {
      this.#following = 0;
      $("transcript").scrollTop = $("transcript").scrollHeight;
    });
  }

  #turn(running) {
    const focused = document.activeElement;
    this.#running = running;
    $("send").hidden = Boolean(running);
    $("stop").hidden = !running;
    if (focused === $("stop")) $("prompt").focus();
  }

  #token(span) {
    return this.#answers.map((answer) => answer.token(span)).find(Boolean);
  }

  #color() {
    $("colors").disabled = !$("probabilities").checked;
    const colored = $("colors").checked && !$("colors").disabled;
    $("transcript").classList.toggle("colored", colored);
    $("legend").hidden = !colored;
  }
}

function turn(who, text) {
  return el("div", { class: "turn" }, el("p", { class: "who" }, who), text);
}

// Sends text that is no number, or that JavaScript would round, as it was typed: the server names the error.
function number(text) {
  const n = Number(text);
  return Number.isNaN(n) || (Number.isInteger(n) && !Number.isSafeInteger(n)) ? text : n;
}

// Times of an answer's text, and the reason of its end.
class Clock {
  #began = performance.now();
  #first = null;
  #last = null;
  usage = null;
  reason = "";

  see(text, choice) {
    if (text) this.#last = performance.now();
    if (text) this.#first ??= this.#last;
    if (choice.finish_reason) this.reason = `finished: ${choice.finish_reason}`;
    return text;
  }

  facts(answer) {
    const made = this.usage?.completion_tokens ?? answer.spans.length;
    const spent = (this.#last - this.#first) / 1000;
    const { prompt_tokens: prompt, prompt_tokens_details: details } = this.usage ?? {};
    return [
      this.reason,
      prompt && `prompt ${count(prompt)}, cached ${count(details.cached_tokens)}`,
      made && `${count(made)} tokens`,
      this.#first && `first after ${seconds((this.#first - this.#began) / 1000)}`,
      spent && made > 1 && `then ${rate((made - 1) / spent)}`,
    ].filter(Boolean).join(" · ");
  }
}

// Text for screen readers, in parts that end with a word instead of token by token.
class Speech {
  #held = "";
  #said = performance.now();

  constructor(element) {
    this.element = element;
    element.replaceChildren();
  }

  say(text) {
    this.#held += text;
    const end = this.#held.lastIndexOf(" ");
    if (performance.now() - this.#said < SPOKEN || end < 0) return;
    this.element.append(el("span", {}, this.#held.slice(0, end + 1)));
    this.#held = this.#held.slice(end + 1);
    this.#said = performance.now();
  }

  end() {
    this.element.append(el("span", {}, this.#held));
  }
}
