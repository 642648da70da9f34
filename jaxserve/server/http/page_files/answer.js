// Renders an answer as it grows, with one span for each token whose probability is known.
//
// The text is the server's; tokens only tell where to cut it: token i covers it from offset i to offset i + 1, counted
// in code points, as the server counts them.

import { el } from "./dom.js";

const DOUBTS = [0.9, 0.7, 0.5, 0.3, 0.1]; // probabilities below which a token's color grows stronger

export class Answer {
  #text = [];
  #spans = [];
  #tokens = [];
  #bytes = new TextDecoder("utf-8", { ignoreBOM: true });
  #said = 0; // code points of a chat's tokens so far
  #opening = ""; // the tokens' text until the answer's own text has begun
  #shift = null; // spaces at the tokens' beginning that the answer does not have

  constructor(element) {
    this.element = element;
  }

  get text() {
    return this.#text.join("");
  }

  get spans() {
    return this.#spans;
  }

  token(span) {
    return this.#tokens[this.#spans.indexOf(span)];
  }

  // Takes a choice of a stream's event, from /v1/completions or /v1/chat/completions.
  push(choice) {
    const text = choice.text ?? choice.delta?.content ?? "";
    this.#text.push(...text);
    const fresh = choice.delta ? this.#ofChat(choice.logprobs) : ofCompletion(choice.logprobs);
    const first = Math.max(this.#tokens.length - 1, 0);
    for (const token of fresh) this.#tokens.push(token);
    if (this.#tokens.length) this.#cut(first);
    else this.element.append(text);
    return text;
  }

  #ofChat(logprobs) {
    return (logprobs?.content ?? []).map((entry) => {
      const offset = this.#said;
      const text = this.#bytes.decode(new Uint8Array(entry.bytes ?? []), { stream: true });
      this.#said += [...text].length;
      if (this.#shift === null) this.#opening += text;
      const top = entry.top_logprobs.map(({ token, logprob }) => [token, logprob]);
      return { offset, name: entry.token, logprob: entry.logprob, top };
    });
  }

  #cut(first) {
    if (this.#text.length) this.#shift ??= Math.max(leading(this.#opening) - leading(this.text), 0);
    const at = (i) => (i < this.#tokens.length ? Math.max(this.#tokens[i].offset - this.#shift, 0) : Infinity);
    for (let i = first; i < this.#tokens.length; i++) {
      this.#spans[i] ??= this.element.appendChild(this.#span(this.#tokens[i]));
      write(this.#spans[i], this.#text.slice(at(i), at(i + 1)).join(""));
    }
  }

  #span({ logprob }) {
    const probability = Math.exp(logprob);
    const doubt = DOUBTS.filter((bound) => probability < bound).length;
    return el("span", { class: "token", "data-doubt": doubt }, "", el("span", { class: "word" }));
  }
}

// The space before a word belongs to the token but is not colored: at a line's end it would be a spot.
function write(span, text) {
  const [, space, word] = text.match(/^( *)(.*)$/s);
  span.firstChild.data = word ? space : "";
  span.lastChild.textContent = word || space;
}

function ofCompletion(logprobs) {
  return (logprobs?.tokens ?? []).map((name, i) => ({
    offset: logprobs.text_offset[i],
    name,
    logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs[i]).sort((a, b) => b[1] - a[1]),
  }));
}

const leading = (text) => text.length - text.replace(/^ +/, "").length;
