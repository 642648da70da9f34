"""Effect of disaggregation on streams beside long prompts: three ways to use two cores.

Question: do long prompts delay other requests' streams less when another server computes them?

    python -m benchmarks.disaggregation [--trace FILE] [--rate 0 --rate 1 ...] [--seconds 30]
    [--json] [--out FILE]

- disaggregated: a prefill server on one core, and a decode server on the other, which every request
  goes to;
- chunked: two servers that do both, one on each core; requests are dealt out in turn; a step has
  --step-tokens at most;
- neither: two servers as for chunked, with steps as long as the context, so that a prompt is
  computed in one step. (This engine cannot do without chunks altogether: of two prompts that come
  together, the second may be cut.)

Short prompts come evenly, --short of them a second, and stream 64 tokens each. Beside them come
long ones, the lengths and shared prefixes of Mooncake's trace times --token-scale (1/8: its blocks
of 512 tokens become pages of 64), cut to the context. Its times are rounded to three seconds, ten
requests at a time, so here they come as a Poisson process, --rate of them a second. Servers are
pinned to their cores; so is this load generator, to the other ones: where there are none, it takes
a share of the servers' two. The servers of all arrangements run, and take turns under each load.

ITL and TTFT are those of the short ones, TTFT of the long ones apart, in milliseconds, at the
client; longest gap is that between two tokens of a short stream, one of each stream: a stall that
p99 of ITL is too coarse for. Tokens/s are those of all outputs. What the decode server says of its
handovers stands behind: prompts that travelled, those that failed and were computed there, MiB of
pages, and seconds of a trip in the mean. With --out, JSON goes there after every load, a picture
beside it as .svg. With --json, the JSON goes to standard output too, instead of the table.
"""
