// Formats numbers for people.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const NONE = "–";

export const count = (n) => (n === undefined ? NONE : n < 1e6 ? whole.format(n) : short.format(n));

export const rate = (n) => (n === null ? NONE : `${n < 10 ? n.toFixed(1) : count(n)}\u00a0/\u00a0s`);

export const percent = (share) => {
  if (share === null || !Number.isFinite(share)) return NONE;
  const n = share * 100;
  return `${n === 0 || n >= 99.95 ? whole.format(n) : n < 0.1 ? "<0.1" : n.toFixed(1)}\u00a0%`;
};

export const seconds = (s) => {
  if (s === null || !Number.isFinite(s)) return NONE;
  if (s < 0.01) return `${(s * 1000).toFixed(1)}\u00a0ms`;
  if (s < 1) return `${(s * 1000).toFixed(0)}\u00a0ms`;
  return s < 100 ? `${s.toFixed(2)}\u00a0s` : `${whole.format(s)}\u00a0s`;
};

export const duration = (s) => {
  const [d, h, m] = [s / 86400, (s / 3600) % 24, (s / 60) % 60].map(Math.floor);
  if (d) return `${d} d ${h} h`;
  if (h) return `${h} h ${m} min`;
  return m ? `${m} min` : `${Math.floor(s)}\u00a0s`;
};

export const parameters = (n) => `${short.format(n)} parameters`;

// Returns a token's text with invisible characters made visible.
export const visible = (text) =>
  text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\r/g, "␍") || "∅";
