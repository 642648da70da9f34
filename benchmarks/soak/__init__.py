"""Growth of two servers' memory, descriptors and threads under mixed traffic, and a canary in it.

Question: does a server that is left running stay as it was?

    python -m benchmarks.soak [--minutes 30] [--clients 12] [--model DIR] [--no-deterministic]
                              [--out FILE]

Two servers run: one generates, with a chat template that knows tools, one embeds (the tests' tiny
Qwen3-Embedding). Many coroutines talk to both over gRPC and HTTP: whole answers, streams, several
choices and prompts, conversations with tools whose calls are required, named or left to the
model, grammars of which half are new, echoes with log-probabilities, connections that end in
mid-stream by FIN or RST, deadlines that pass, aborted requests, equal ids, bad bodies and paths,
embeddings in every form. Each coroutine deals all kinds of action out in random order, again and
again. Every answer is checked: status, end of the stream, JSON of calls and grammars.

Every second each server's memory, descriptors and threads, and its child processes (one checks
grammars), are read from /proc. A line is fitted to the second half of each: in the first, the
allocators below Python and gRPC reach their height. Series of /metrics are compared between the
beginning of the second half and the end. In the end, with nobody calling, nothing may be in use.

The canary: every few seconds one greedy request of 60 tokens goes beside the load, and its text
and log-probabilities have to be those of before the load. The server that generates runs with
--deterministic, since only that promises tokens whatever the load; each kind of step then has one
shape, so that log-probabilities are bit for bit the same too (docs/sampling.md). What this flag
turns off, such as forced tokens of grammars, preemption and steps of several sizes, is soaked with
--no-deterministic: there, differences of the canary are counted and are no failure.

Exit code 1 when something grew, was in use in the end, was not answered as expected, or when the
canary differed. The figures need some 20 minutes: in the first ones memory always grows.
"""
