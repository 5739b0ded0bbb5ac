"""Methods tried on a user's own model: `js.race` and `js.recipes`.

recipes      `js.recipes`: chains of an optimizer and an exchange, by name
batching     batches of all workers from a function or an iterable, which each seed starts elsewhere
training     one method at one rate from one seed: a compiled program of several steps
tuning       one method at all rates, the worse half of which ends early, and the workers' agreement
run          `js.race`: all methods, dense first; a file keeps the finished ones
result       `Race`: the table, the best method on a link, the figure, and evidence for `js.costs.advise`
"""
