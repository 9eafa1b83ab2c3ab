"""Training under a plan with trainers that others wrote. Nothing here is imported but by its user: each
module needs a package that pycomm does without.

transformers.py    PlanTrainer, a transformers.Trainer
lightning.py       PlanStrategy, for lightning's Trainer
rows.py            what both do with batches of few rows, and ask of a loader

Accelerate and Lightning Fabric need no module: docs/trainers.md.
"""
