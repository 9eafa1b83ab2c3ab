"""The Triton kernels of pycomm.fused, one file per operation; tile.py and signal.py hold what they share.
docs/fused.md has the pictures.

Stock Triton, 3.6 to 3.9: no inline assembly, no libdevice. The same functions run on a GPU and in Triton's
interpreter on CPU tensors; for the interpreter 16-bit operands are widened before a product (UPCAST), since
it multiplies the bit patterns of bf16 otherwise.
"""
