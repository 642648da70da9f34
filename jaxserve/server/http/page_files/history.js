// Keeps the last minute of the server's messages, and computes rates over it.

export const SPAN = 60; // seconds

export class History {
  #messages = [];

  // Counters start at 0 when the server restarts, and so does the history.
  add(message) {
    const last = this.#messages.at(-1);
    if (message.at === last?.at) return;
    if (last && (message.at < last.at || message.at > last.at + SPAN || fewer(message, last))) this.#messages = [];
    this.#messages.push(message);
    while (this.#messages[0].at < message.at - SPAN - 0.5) this.#messages.shift();
  }

  get newest() {
    return this.#messages.at(-1);
  }

  get before() {
    return this.#messages.at(-2);
  }

  get seconds() {
    return this.newest.at - this.#messages[0].at;
  }

  values(read) {
    return this.#messages.map(read);
  }

  // Growth of a counter in the window; null while there is no window.
  grown(read) {
    return this.#messages.length < 2 ? null : read(this.newest) - read(this.#messages[0]);
  }

  // Growth per second in the window.
  rate(read) {
    const grown = this.grown(read);
    return grown === null ? null : grown / this.seconds;
  }

  // Growth per second between each two messages.
  rates(read) {
    const pairs = this.#messages.slice(1).map((message, i) => [this.#messages[i], message]);
    return pairs.map(([a, b]) => (read(b) - read(a)) / (b.at - a.at));
  }

  // Observations of a histogram in the window: [[upper bound, count], ...].
  distribution(name) {
    const counts = ({ metrics }) => cumulative(metrics[name]);
    const now = counts(this.newest);
    const then = this.#messages.length < 2 ? now : counts(this.#messages[0]);
    const grown = now.map(([bound, n], i) => [bound, n - then[i][1]]);
    return grown.map(([bound, n], i) => [bound, n - (i ? grown[i - 1][1] : 0)]);
  }
}

function fewer(a, b) {
  return a.metrics.computed_tokens < b.metrics.computed_tokens;
}

function cumulative({ le }) {
  const number = (bound) => (bound === "+Inf" ? Infinity : Number(bound));
  return Object.entries(le).map(([bound, n]) => [number(bound), n]).sort((a, b) => a[0] - b[0]);
}

export function total(histogram) {
  return histogram.le["+Inf"];
}

export function mean(histogram) {
  return total(histogram) ? histogram.sum / total(histogram) : null;
}

// A quantile, interpolated within its bucket like Prometheus's histogram_quantile; null without observations.
export function quantile(distribution, q) {
  const all = distribution.reduce((sum, [, n]) => sum + n, 0);
  if (!all) return null;
  let [passed, below] = [0, 0];
  for (const [bound, n] of distribution) {
    const part = (q * all - passed) / n;
    if (n && part <= 1) return bound === Infinity ? below : below + (bound - below) * part;
    [passed, below] = [passed + n, bound];
  }
  return below;
}
