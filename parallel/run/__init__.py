"""What par.step, par.evaluate and par.predict do with a parallelized model.

prepare.py            the microbatches of this rank, and what their losses count for
passes.py             forward and backward of this rank's stages
loss.py               the loss of a microbatch
model_loss.py         the loss that a model has of its own
router_loss.py        the loss that a mixture of experts of transformers adds for its routers
updates.py            the update at the end of a step: gradients, norm, optimizer
                      (PipeDream's after every microbatch: pipeline/updates.py)
step.py               a training step from these parts
own_loop.py           a loop of the user's own: loss.backward(), opt.step()
own_gradients.py      its gradients until opt.step()
scaling.py            a GradScaler around a step
evaluate.py           the loss and other means without gradients
predict.py            the model's output on every rank
generate.py           generate() of transformers' models
written_buffers.py    buffers that the forwards of a step have written
replicas.py           whether ranks that hold the same have the same: Plan(compare_every=)
aside.py              a run of a few rows for a check, through the plan's own passes
questions.py          what is asked before a batch is cut, and when
"""
