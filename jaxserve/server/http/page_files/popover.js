// Shows the alternatives of a token, on hover and with the arrow keys.

import { $, el } from "./dom.js";
import { percent, visible } from "./format.js";

export class Popover {
  #span = null;

  constructor(root, tokenOf) {
    this.root = root;
    this.tokenOf = tokenOf;
    this.box = $("popover");
    root.addEventListener("pointerover", (event) => this.#aim(event.target.closest(".token")));
    root.addEventListener("pointerleave", () => this.hide());
    root.addEventListener("scroll", () => this.hide(), { passive: true });
    root.addEventListener("keydown", (event) => this.#walk(event));
    root.addEventListener("blur", () => this.hide());
    document.addEventListener("pointerdown", ({ target }) => root.contains(target) || this.hide());
  }

  hide() {
    this.#span?.classList.remove("aimed");
    this.#span = null;
    this.box.hidden = true;
  }

  #aim(span) {
    if (span === this.#span) return;
    this.hide();
    const token = span && this.tokenOf(span);
    if (token) this.#show(span, token);
  }

  #walk(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const spans = step ? [...this.root.querySelectorAll(".token")].filter((span) => span.textContent) : [];
    if (!spans.length) return;
    event.preventDefault();
    const at = spans.indexOf(this.#span);
    const next = spans[at < 0 ? (step > 0 ? 0 : spans.length - 1) : at + step];
    if (!next) return;
    next.scrollIntoView({ block: "nearest" });
    this.#aim(next);
  }

  #show(span, token) {
    this.#span = span;
    span.classList.add("aimed");
    const chosen = el("p", {}, el("b", {}, visible(token.name)), " ", el("span", {}, percent(Math.exp(token.logprob))));
    this.box.replaceChildren(chosen, ...alternatives(token));
    this.box.hidden = false;
    const [at, box] = [span.lastChild.getBoundingClientRect(), this.box.getBoundingClientRect()];
    const above = at.top - box.height - 6;
    this.box.style.top = `${above > 4 ? above : at.bottom + 6}px`;
    this.box.style.left = `${Math.min(Math.max(at.left - 12, 8), innerWidth - box.width - 8)}px`;
  }
}

function alternatives({ name, top }) {
  if (!top.length) return [];
  const rows = top.map(([text, logprob]) => {
    const p = Math.exp(logprob);
    const meter = el("meter", { min: 0, max: 1, value: p });
    const chosen = text === name ? { class: "chosen" } : {};
    return el("tr", chosen, el("td", {}, visible(text)), el("td", {}, meter), el("td", {}, percent(p)));
  });
  return [el("table", {}, el("tbody", {}, ...rows))];
}
