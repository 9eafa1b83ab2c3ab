"""What par.step, par.evaluate and par.predict do with a parallelized model.

prepare.py     the microbatches of this rank, and what their losses count for
passes.py      forward and backward of this rank's stages
loss.py        the loss of a microbatch
updates.py     the update at the end of a step: gradients, norm, optimizer
               (PipeDream's after every microbatch: pipeline/updates.py)
step.py        a training step from these parts
prove_*.py     what is asked of the model before it is trained (checks/)
scaling.py     a GradScaler around a step
evaluate.py    the loss and other means without gradients
predict.py     the model's output on every rank
generate.py    generate() of transformers' decoders
"""
