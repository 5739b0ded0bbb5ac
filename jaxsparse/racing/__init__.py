"""Methods tried on a user's own model: `js.race` and `js.recipes`.

recipes      `js.recipes`: chains of an optimizer and an exchange, by name
batching     batches of all workers from a function or an iterable, for each seed from elsewhere
training     one method at one rate from one seed: a compiled program of several steps
run          `js.race`: rates are halved, dense first, and what is finished is kept in a file
result       `Race`: the table, the best method on a link, the figure, and evidence for `js.costs.advise`
"""
