"""What par.step, par.evaluate and par.predict do with a parallelized model.

prepare.py            the microbatches of this rank, and what their losses count for
passes.py             forward and backward of this rank's stages
loss.py               the loss of a microbatch
model_loss.py         the loss that a model has of its own
router_loss.py        the loss that a mixture of experts of transformers adds for its routers
updates.py            the update at the end of a step: gradients, norm, optimizer
                      (PipeDream's after every microbatch: pipeline/updates.py)
step.py               a training step from these parts
scaling.py            a GradScaler around a step
evaluate.py           the loss and other means without gradients
predict.py            the model's output on every rank
generate.py           generate() of transformers' models
written_buffers.py    buffers that the forwards of a step have written

What is asked of the model and the loss in the first steps:

rows_trial.py         whether each row of a batch is computed from this row alone
rows_layout.py        where the tensors of an output have the rows
rows_stages.py        a forward of a few rows through the stages of a pipeline
loss_of_rows.py       whether a loss that uses numbers of the model is a mean over rows
loss_trial.py         whether loss_fn is a mean over the targets that count
prove_rows.py         when rows_trial.py and loss_of_rows.py run
prove_loss.py         when loss_trial.py runs
prove_glue.py         when sequence/glue.py runs
"""
