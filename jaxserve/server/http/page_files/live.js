// The live view: the state that /live sends once a second, with the numbers of /metrics, over the last minute.

import { bars, sparkline } from "./charts.js";
import { $, el } from "./dom.js";
import { count, duration, NONE, percent, rate, seconds } from "./format.js";
import { History, mean, quantile, SPAN, total } from "./history.js";

const sum = (byLabel) => Object.values(byLabel).reduce((a, b) => a + b, 0);
const metric = (name) => ({ metrics }) => metrics[name];

export class LiveView {
  #history = new History();
  #parts = [];

  constructor(root) {
    this.root = root;
    root.append(this.#engine(), this.#work(), this.#latency(), this.#ends(), this.#experts(), this.#steps());
  }

  show(message) {
    this.#history.add(message);
    for (const update of this.#parts) update(message, this.#history);
  }

  #engine() {
    return group(
      "Engine",
      this.#gauge("running", "Rows", metric("num_requests_running"), ({ engine }) => ({
        most: engine.rows,
        beside: `of ${count(engine.rows)}`,
      })),
      this.#gauge("waiting", "Queue", metric("num_requests_waiting"), () => ({ beside: "waiting for a row" })),
      this.#gauge("pages", "Pages", ({ pages }) => pages.used, ({ pages: { total }, metrics }) => ({
        most: total,
        beside: total ? `of ${count(total)}, ${percent(metrics.kv_cache_usage_perc)}` : "before the first step",
      })),
      this.#tile("compiles", "Compiles waited for", (m) => {
        const raw = m.metrics.compiles_after_ready;
        const pending = m.metrics.buckets_pending;
        const beside = pending ? `${count(pending)} steps to come` : "all steps are there";
        return { raw, text: count(raw), beside: raw ? "something is wrong" : beside, wrong: raw > 0 };
      }),
    );
  }

  #work() {
    return group(
      `Tokens: the last ${SPAN} s, and in all`,
      this.#flow("generated", "Generated", "generation_tokens"),
      this.#flow("prompts", "Prompts", "prompt_tokens"),
      this.#share("hits", "Prompt found in cache", "prefix_cache_hits", "prefix_cache_queries"),
      this.#share("padding", "Padding", "padding_tokens", "computed_tokens"),
    );
  }

  #latency() {
    return group(
      `Latency: the last ${SPAN} s, and the mean of all`,
      this.#spread("ttft", "Time to first token", "time_to_first_token_seconds"),
      this.#spread("tpot", "Time per token after it", "request_time_per_output_token_seconds"),
    );
  }

  // ---- kinds of tiles

  #tile(id, label, read, chart) {
    const value = el("data", { id, class: "value" });
    const [note, more] = [el("span", { class: "small" }), el("p", { class: "small" })];
    this.#parts.push((message, history) => {
      const { raw, text, beside, below = "", wrong = false } = read(message, history);
      value.value = raw;
      value.textContent = text;
      note.textContent = beside;
      more.textContent = below;
      value.classList.toggle("wrong", wrong);
    });
    const reading = el("p", { class: "reading" }, value, note);
    return el("div", { class: "tile" }, el("p", { class: "label" }, label), reading, more, ...(chart ? [chart] : []));
  }

  #gauge(id, label, read, bound) {
    const line = sparkline(SPAN + 1);
    this.#parts.push((message, history) => line.draw(history.values(read), bound(message).most));
    const said = (m) => ({ raw: read(m), text: count(read(m)), beside: bound(m).beside });
    return this.#tile(id, label, said, line.element);
  }

  #flow(id, label, name) {
    const [read, line] = [metric(name), sparkline(SPAN + 1)];
    this.#parts.push((message, history) => line.draw(history.rates(read)));
    const said = (m, history) => {
      return { raw: read(m), text: rate(history.rate(read)), beside: `${count(read(m))}` };
    };
    return this.#tile(id, label, said, line.element);
  }

  #share(id, label, part, whole) {
    const line = sparkline(SPAN + 1);
    const shares = (history) => {
      const [parts, wholes] = [history.rates(metric(part)), history.rates(metric(whole))];
      return parts.map((n, i) => (wholes[i] > 0 ? n / wholes[i] : null));
    };
    this.#parts.push((message, history) => line.draw(shares(history), 1));
    return this.#tile(id, label, (m, history) => {
      const grown = history.grown(metric(whole));
      const share = grown ? history.grown(metric(part)) / grown : null;
      const [raw, all] = [m.metrics[part], m.metrics[whole]];
      return { raw, text: percent(share), beside: `${count(raw)} of ${count(all)}` };
    }, line.element);
  }

  #spread(id, label, name) {
    const picture = bars();
    this.#parts.push((message, history) => {
      const distribution = history.distribution(name);
      const median = quantile(distribution, 0.5);
      const at = distribution.findIndex(([bound]) => median !== null && bound >= median);
      picture.draw(distribution.map(([, n]) => n), names(distribution), at);
    });
    return this.#tile(id, label, (m, history) => {
      const all = m.metrics[name];
      const [p50, p90, p99] = [0.5, 0.9, 0.99].map((q) => seconds(quantile(history.distribution(name), q)));
      const below = `p99\u00a0${p99}, mean of ${count(total(all))}: ${seconds(mean(all))}`;
      return { raw: total(all), text: p50, beside: `p90 ${p90}`, below };
    }, picture.element);
  }

  // ---- the rest

  #ends() {
    const list = el("dl", { class: "ends" });
    this.#parts.push(({ metrics, ready_seconds: age }) => {
      const entries = [
        ...Object.entries(metrics.request_success).map(([reason, n]) => [reason, n]),
        ["failed or refused", sum(metrics.request_failure), Object.entries(metrics.request_failure)],
        ["client went away", metrics.request_cancelled],
        ["preempted", metrics.num_preemptions],
        ["ready for", duration(age)],
      ];
      list.replaceChildren(...entries.map(([name, value, why]) => entry(name, value, why)));
    });
    return section("Requests since the start", list);
  }

  #experts() {
    const [picture, note] = [bars(), el("p", { class: "small" })];
    const whole = section("Experts: the busiest beside the mean, by layer", picture.element, note);
    whole.classList.add("experts");
    this.#parts.push(({ metrics }) => {
      whole.hidden = !metrics.expert_imbalance;
      if (whole.hidden) return;
      const layers = Object.entries(metrics.expert_imbalance);
      const values = layers.map(([, n]) => n);
      const most = values.indexOf(Math.max(...values));
      picture.draw(values, layers.map(([layer, n]) => `layer ${layer}: ${n.toFixed(2)}`), most);
      note.textContent = `${values[most].toFixed(2)} times the mean in layer ${layers[most][0]}; 1 is even`;
    });
    return whole;
  }

  #steps() {
    const body = el("tbody", { id: "steps" });
    const names = ["step", "rows", "tokens", "runs", "", "padding"];
    const heads = names.map((name) => (name ? el("th", { scope: "col" }, name) : el("td")));
    const head = el("thead", {}, el("tr", {}, ...heads));
    this.#parts.push((message, history) => {
      const most = Math.max(...message.steps.map((step) => step.launches), 1);
      const before = history.before?.steps ?? message.steps;
      body.replaceChildren(...message.steps.map((step, i) => row(step, most, step.launches > before[i].launches)));
    });
    return section("Compiled steps", el("table", { class: "steps" }, head, body));
  }
}

function names(distribution) {
  return distribution.map(([bound, n]) => `${bound === Infinity ? "longer" : `up to ${seconds(bound)}`}: ${count(n)}`);
}

function section(title, ...children) {
  return el("section", {}, el("h2", {}, title), ...children);
}

function group(title, ...tiles) {
  return section(title, el("div", { class: "tiles" }, ...tiles));
}

function entry(name, value, why = []) {
  const reasons = why.map(([reason, n]) => `${reason} ${count(n)}`).join(", ");
  const number = typeof value === "number" ? el("data", { value }, count(value)) : value;
  return el("div", {}, el("dt", {}, name), el("dd", {}, number), el("dd", { class: "small" }, reasons));
}

function row({ kind, rows, tokens, steps, launches, live_tokens: live, computed_tokens: computed }, most, ran) {
  const name = steps > 1 ? `${kind} × ${steps}` : kind;
  const meter = el("meter", { min: 0, max: most, value: launches, "aria-label": "share of the most run step" });
  const padding = computed ? percent(1 - live / computed) : NONE;
  const cells = [name, count(rows), count(tokens), el("data", { value: launches }, count(launches)), meter, padding];
  return el("tr", { class: ran ? "ran" : launches ? "" : "idle" }, ...cells.map((cell) => el("td", {}, cell)));
}
