"""Training steps of all workers: engines, init and step, simulation, and how long an update takes."""
